"""Load a transformers model by slices: build it without memory, shard it, and let each rank read its own part.

The names of the tensors in files are those that transformers itself would load, by its tables of conversions. Stacks of
experts are read as well; a model with another conversion is loaded whole (`hub.load_model`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights

from ckpt import Block, Checkpoint, Piece, open_checkpoint
from ckpt.files.tensor_bytes import same_bytes
from ckpt.layout.pieces import Shape, full_box
from parallel_layers.sharding import is_dtensor
from rl_models.engines.transformers.hub import quiet, refuse_misfits, stored_tensors

# Tensors in files that no model reads.
_IGNORED = (r"rotary_emb\.inv_freq$",)


def model_without_memory(
    auto_class: Any,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    may_lack: str = "$^",
    may_have: str = "$^",
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Block], list[str]] | None:
    """Return a model of `auto_class` in evaluation mode, whose parameters are on the meta device.

    Buffers that no checkpoint has (rotary frequencies) are on `device`, with their values.

    Args:
        auto_class, path, dtype, may_lack, may_have, **options: See `hub.load_model`.
        device: The device of the buffers.

    Returns:
        The model; each of its tensors as a block of the checkpoint's tensors; and the names of those that the
        checkpoint lacks. None: transformers converts tensors in a way that blocks cannot express, or does not compute
        one of the buffers.

    Raises:
        ValueError: As `hub.load_model`; or the checkpoint holds both of two tied tensors, with different values.
    """
    with quiet():
        config = AutoConfig.from_pretrained(path, local_files_only=True, **options)
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
        model.tie_weights()
    if plan := model._get_dtype_plan(dtype):
        pattern, groups, _ = build_glob_alternation(list(plan))
        for name, parameter in model.named_parameters():
            if (found := pattern.search(name)) is not None:
                parameter.data = parameter.data.to(plan[groups[str(found.lastgroup)]])
    if not _fill_buffers(model, device):
        return None
    blocks = _file_blocks(model, open_checkpoint(path), may_lack, may_have)
    if blocks is None:
        return None
    lacked = [name for name in stored_tensors(model) if name not in blocks]
    return model.eval(), blocks, lacked


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> bool:
    """Compute the buffers that no checkpoint has; return whether all have values."""
    for tensor in stored_tensors(model).values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then leaves the tensor alone
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = _unlikely(buffer, device)
    model.initialize_weights()
    buffers = (buffer for buffer in model.buffers() if not buffer.is_meta)
    return not any(torch.equal(buffer, _unlikely(buffer, device)) or buffer.isnan().any() for buffer in buffers)


def _unlikely(buffer: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like a buffer, of values that transformers does not give to buffers."""
    value: float = math.nan
    if not buffer.is_floating_point():
        value = False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
    return torch.full_like(buffer, value, device=device)


def allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Give the tensors on the meta device memory on `device`, and tie them again; their values are arbitrary."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model.tie_weights()


def _file_blocks(
    model: PreTrainedModel, checkpoint: Checkpoint, may_lack: str, may_have: str
) -> dict[str, Block] | None:
    """Return each tensor of a model that a checkpoint has as a block; see `model_without_memory`."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    state = model.state_dict(keep_vars=True)
    own = {id(tensor): name for name, tensor in stored_tensors(model).items()}
    # Model's tensor -> a name of it -> its files' tensors, each with the pattern of a converter or None.
    found: dict[str, dict[str, list[tuple[str, str | None]]]] = {}
    unexpected = []
    ignored = [may_have, *_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ())]
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if name in state:
            found.setdefault(own[id(state[name])], {}).setdefault(name, []).append((key, pattern))
        elif not any(re.search(each, name) for each in ignored):
            unexpected.append(name)
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    blocks: dict[str, Block] = {}
    misshapen = []
    for name, tensor in stored_tensors(model).items():
        if name not in found:
            continue
        _refuse_different_copies(checkpoint, found[name])
        entries = next(iter(found[name].values()))
        shapes = [checkpoint.tensors[key][1].shape for key, _ in entries]
        pattern = entries[0][1]
        pieces = _pieces(entries, shapes, None if pattern is None else of_pattern[pattern])
        if pieces is None:
            return None
        extent = tuple(max(stop for _, stop in sides) for sides in zip(*(p.local_range for p in pieces), strict=True))
        if extent != tensor.shape:
            misshapen.append(f"{name}: {extent} where the model has {tuple(tensor.shape)}")
        else:
            blocks[name] = Block(tuple(tensor.shape), tuple(pieces))
    missing = [name for name in own.values() if name not in found and not re.fullmatch(may_lack, name)]
    refuse_misfits(checkpoint.path, sorted(missing), sorted(unexpected), sorted(misshapen))
    return blocks


def _refuse_different_copies(checkpoint: Checkpoint, names: dict[str, list[tuple[str, str | None]]]) -> None:
    """Raise ValueError if files hold several tensors for one tied tensor and they differ."""
    (first, *_), *others = names.values()
    for (key, _), *_ in others:
        (file, info), (other_file, other) = checkpoint.tensors[first[0]], checkpoint.tensors[key]
        alike = (info.dtype, info.shape) == (other.dtype, other.shape)
        if not alike or not same_bytes((checkpoint.path / file, info), (checkpoint.path / other_file, other)):
            raise ValueError(
                f"{checkpoint.path}: {key} differs from {first[0]}, and config.json ties them; set tie_word_embeddings "
                f"to false in config.json, or remove {key} if it is to be the other"
            )


def _pieces(
    entries: list[tuple[str, str | None]], shapes: list[Shape], converter: WeightConverter | None
) -> list[Piece] | None:
    """Return the files' tensors as pieces of one tensor of the model; None: the conversion is no stack."""
    if converter is None:
        ((key, _),), (shape,) = entries, shapes
        return [Piece.whole(key, shape)]
    steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    if steps not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return None
    return list(_stacked(entries, shapes, converter.source_patterns))


def _stacked(entries: list[tuple[str, str | None]], shapes: list[Shape], patterns: list[str]) -> Iterator[Piece]:
    """Yield the matrices of experts as pieces of `[E, rows, columns]`; each pattern has its rows below the other's."""
    first = 0
    for pattern in patterns:
        chosen = [(key, shape) for (key, found), shape in zip(entries, shapes, strict=True) if found == pattern]
        for expert, (key, (rows, columns)) in enumerate(chosen):
            box = (expert, expert + 1), (first, first + rows), (0, columns)
            yield Piece(key, full_box((rows, columns)), box)
        first += chosen[0][1][0] if chosen else 0


@torch.no_grad()
def fill_randomly(module: nn.Module, names: list[str]) -> None:
    """Draw the named parameters, so that a probe sees what they multiply."""
    for name in names:
        parameter = module.get_parameter(name)
        local = parameter.to_local() if is_dtensor(parameter) else parameter
        local.normal_(generator=torch.Generator(local.device).manual_seed(0))
