"""Load a transformers model by slices: build it without memory, shard it, and let each rank read its own part.

The names of the tensors in files are those that transformers itself would load, by its tables of conversions.
Conversions that move rows (stacks of experts, fused or permuted projections) or transpose matrices are read as well; a
model with another conversion is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging

from ckpt import Block, Checkpoint, Piece
from ckpt.files import Transposed, same_bytes
from ckpt.transfer import refuse_integers
from parallel_layers.module import is_dtensor

# Tensors in files that no model reads.
_IGNORED = (r"rotary_emb\.inv_freq$",)
# Steps of conversions that move rows and change no number.
_MOVES = {"Chunk", "Concatenate", "MergeModulelist", "PermuteForRope"}


class Files(NamedTuple):
    """The location of a model's tensors in the files of a checkpoint.

    Attributes:
        checkpoint: The checkpoint; matrices that transformers transposes are `Transposed`.
        blocks: The model's tensors as blocks of the checkpoint's tensors.
    """

    checkpoint: Checkpoint
    blocks: dict[str, Block]

    @property
    def transposed(self) -> list[str]:
        """The model's tensors that the files hold transposed."""
        tensors = self.checkpoint.tensors
        return [n for n, block in self.blocks.items() if isinstance(tensors[block.names[0]][1], Transposed)]


class UnloadedModel(NamedTuple):
    """A model of transformers, where its tensors lie in files, and the names of those that the checkpoint lacks."""

    model: PreTrainedModel
    files: Files
    lacked: list[str]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and notes of transformers inside."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds: parameters (tied parameters once) and saved buffers."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def model_without_memory(
    from_config: Callable[..., PreTrainedModel],
    config: PreTrainedConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    may_lack: str = "$^",
    may_have: str = "$^",
) -> UnloadedModel:
    """Return a model in evaluation mode, whose parameters are on the meta device.

    Buffers that no checkpoint has (rotary frequencies) are on `device`, with their values.

    Args:
        from_config: Makes the model from its config, in the given `dtype`.
        config: The config of the model.
        checkpoint: The checkpoint that the model is to read.
        dtype: The dtype of the parameters.
        device: The device of the buffers.
        may_lack: Regular expression of parameters that the checkpoint may lack.
        may_have: Regular expression of tensors that the checkpoint may have beyond the model's.

    Raises:
        ValueError: The checkpoint lacks tensors, has others, has tensors of another shape, or holds both of two tied
            tensors, with different values; transformers converts tensors in a way that blocks cannot express, or does
            not compute one of the buffers.
    """
    with _quiet():
        with torch.device("meta"), no_init_weights():
            model = from_config(config, dtype=dtype)
        model.tie_weights()
    if plan := model._get_dtype_plan(dtype):
        pattern, groups, _ = build_glob_alternation(list(plan))
        for name, parameter in model.named_parameters():
            if (match := pattern.search(name)) is not None:
                parameter.data = parameter.data.to(plan[groups[str(match.lastgroup)]])
    if not _fill_buffers(model, device):
        raise ValueError(_unreadable(checkpoint.path, model, "does not initialise all buffers"))
    files = _find_files(model, checkpoint, may_lack, may_have)
    lacked = [name for name in stored_tensors(model) if name not in files.blocks]
    return UnloadedModel(model.eval(), files, lacked)


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


def _unreadable(path: Path, model: PreTrainedModel, problem: str) -> str:
    return (
        f"{path}: transformers {problem} of model_type={model.config.model_type!r}, so that ranks cannot read their "
        "own rows; use backend='parallel'"
    )


def _find_files(model: PreTrainedModel, checkpoint: Checkpoint, may_lack: str, may_have: str) -> Files:
    """Return where the tensors of a model lie in files; arguments and errors as for `model_without_memory`."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in stored_tensors(model).items()}
    # Name in the model -> keys in files, each with the pattern of a converter or None.
    entries_of: dict[str, list[tuple[str, str | None]]] = {}
    unexpected: list[str] = []
    matrices: dict[str, bool] = {}  # key of stacked matrices that transformers may transpose -> whether it must
    ignored = [f"^(?:{may_have})$", *_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ())]
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if name not in state:
            unexpected += [] if any(re.search(regex, name) for regex in ignored) else [name]
            continue
        if pattern is not None and _transposes(of_pattern[pattern]):
            pattern = None
            matrices[key] = checkpoint.tensors[key][1].shape != state[name].shape
        entries_of.setdefault(name, []).append((key, pattern))
    if any(matrices.values()):
        # transformers saves these matrices as the model has them, and would take a square one so from any files.
        checkpoint = checkpoint.transposed(matrices)
    # Model's tensor -> each of its names in the model -> its pieces in the files.
    pieces_of: dict[str, dict[str, list[Piece]]] = {}
    for name, entries in entries_of.items():
        pattern = entries[0][1]
        pieces = _pieces(name, entries, None if pattern is None else of_pattern[pattern], checkpoint, model)
        if pieces is None or not pieces.keys() <= state.keys():
            raise ValueError(_unreadable(checkpoint.path, model, f"converts the tensor {name}"))
        for alias, alias_pieces in pieces.items():
            pieces_of.setdefault(names[id(state[alias])], {})[alias] = alias_pieces
    blocks: dict[str, Block] = {}
    misshapen = []
    for name, tensor in stored_tensors(model).items():
        if name not in pieces_of:
            continue
        _refuse_different_copies(checkpoint, pieces_of[name])
        if tensor.is_floating_point():
            refuse_integers(checkpoint, (piece.name for pieces in pieces_of[name].values() for piece in pieces))
        stored = next(iter(pieces_of[name].values()))
        extent = tuple(max(stop for _, stop in sides) for sides in zip(*(p.local_range for p in stored), strict=True))
        if extent != tensor.shape:
            misshapen.append(f"{name}: {extent} where the model has {tuple(tensor.shape)}")
        else:
            blocks[name] = Block(tuple(tensor.shape), tuple(stored))
    missing = [name for name in names.values() if name not in pieces_of and not re.fullmatch(may_lack, name)]
    _refuse_misfits(checkpoint.path, sorted(missing), sorted(unexpected), sorted(misshapen))
    return Files(checkpoint, blocks)


def _refuse_misfits(path: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    """Raise ValueError if a checkpoint lacks tensors, has others, or has tensors of another shape."""
    problems = {"lacks": missing, "has unexpected": unexpected, "has the wrong shape for": misshapen}
    for problem, names in problems.items():
        if names:
            number = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            raise ValueError(
                f"{path} {problem} {', '.join(names[:3])} ({number}); the files do not belong to its config.json"
            )


def _refuse_different_copies(checkpoint: Checkpoint, names: dict[str, list[Piece]]) -> None:
    """Raise ValueError if files hold several tensors for one tied tensor and they differ."""
    first_key, *other_keys = (pieces[0].name for pieces in names.values())
    for key in other_keys:
        if not same_bytes(checkpoint.tensors[first_key], checkpoint.tensors[key]):
            raise ValueError(
                f"{checkpoint.path}: {key} differs from {first_key}, and config.json ties them; set "
                f"tie_word_embeddings to false in config.json to keep both, or remove {key} from the files to use "
                f"{first_key} for both"
            )


def _transposes(converter: WeightConverter) -> bool:
    """Return whether a conversion transposes each matrix of a stack."""
    return [(type(step).__name__, vars(step).get("dim0"), vars(step).get("dim1")) for step in converter.operations] == [
        ("Transpose", 1, 2)
    ]


def _pieces(
    name: str,
    entries: Sequence[tuple[str, str | None]],
    converter: WeightConverter | None,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
) -> dict[str, list[Piece]] | None:
    """Return the pieces in the files of each model tensor that comes from these keys.

    transformers converts the numbers of the rows in place of the rows. None: the conversion does more than move rows.
    """
    shapes = [checkpoint.tensors[key][1].shape for key, _ in entries]
    if converter is None:
        ((key, _),), (shape,) = entries, shapes
        return {name: [Piece.whole(key, shape)]}
    if not {type(step).__name__ for step in converter.operations} <= _MOVES:
        return None
    converter, keys, width = deepcopy(converter), [key for key, _ in entries], shapes[0][1:]
    stride = max(shape[0] for shape in shapes) + 1  # consecutive numbers are neighbours in one file's tensor
    for number, ((key, pattern), shape) in enumerate(zip(entries, shapes, strict=True)):
        rows = torch.arange(shape[0])[:, None] + number * stride
        converter.add_tensor(name, key, str(pattern), rows)  # a tensor, as in a save
    try:
        converted = converter.convert(name, model=model, config=model.config)
    except RuntimeError:
        converted = {}
    if not converted or any(shape[1:] != width for shape in shapes):
        listed = ", ".join(map(str, sorted(set(shapes))))
        raise ValueError(
            f"{checkpoint.path}: {len(keys)} tensors of shapes {listed}, such as {keys[0]}, do not join to {name}; the "
            "files do not belong to its config.json"
        )
    if any(numbers.shape[-1] != 1 for numbers in converted.values()):
        return None  # columns have moved
    return {alias: list(_runs(numbers, keys, stride, width)) for alias, numbers in converted.items()}


def _runs(numbers: Tensor, keys: Sequence[str], stride: int, width: tuple[int, ...]) -> Iterator[Piece]:
    """Yield neighbouring rows as pieces; `numbers` `[..., rows, 1]` are rows of `keys`, `stride` numbers a key."""
    *stack, count, _ = numbers.shape
    rows, columns = numbers.reshape(-1, count), tuple((0, size) for size in width)
    begins = torch.cat([torch.ones_like(rows[:, :1], dtype=torch.bool), rows.diff() != 1], dim=1)
    run_starts = begins.nonzero().tolist()
    following = [*run_starts[1:], [len(rows), 0]]
    for (index, start), (then, end), row in zip(run_starts, following, rows[begins].tolist(), strict=True):
        number, begin = divmod(row, stride)
        stop = end if then == index else count
        stack_range = ((index, index + 1),) if stack else ()
        yield Piece(keys[number], ((begin, begin + stop - start), *columns), (*stack_range, (start, stop), *columns))


@torch.no_grad()
def fill_randomly(module: nn.Module, names: list[str]) -> None:
    """Draw the named parameters, so that a probe sees their inputs."""
    for name in names:
        parameter = module.get_parameter(name)
        local = parameter.to_local() if is_dtensor(parameter) else parameter
        local.normal_(generator=torch.Generator(local.device).manual_seed(0))
