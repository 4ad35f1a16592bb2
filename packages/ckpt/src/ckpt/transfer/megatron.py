"""Read Megatron-Core's distributed checkpoints (`torch_dist`), without Megatron-Core and without a GPU.

A run's folder has `latest_checkpointed_iteration.txt` and a folder for each step, `iter_0000100`, or `release` for
weights that no training step has changed. A step's folder has the tensors (`ckpt.files.torch_dist`), `metadata.json`
(the format) and `common.pt`, a pickle that is never read.
"""

import dataclasses
import itertools
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.files.contents import CONFIG, MEGATRON_FORMAT, RELEASE, TRACKER
from ckpt.files.header import Header, TensorInfo
from ckpt.files.torch_dist import METADATA, ChunkReader, StoredTensor, read_index
from ckpt.layout.config import load_config, read_json_file
from ckpt.layout.families.table import Target
from ckpt.layout.megatron_names import EMBEDDING, HEAD, stored_blocks
from ckpt.layout.model_layout import Layout, layout_for
from ckpt.layout.pieces import Block, cover_problem
from ckpt.transfer.tensor_files import Source, TensorFiles

# Optimizer state and random states; layers of multi-token prediction, which no layout for Megatron-Core has.
_OTHER_STATE = re.compile(r"((chained_\d+\.)?optimizer|random|rng_state|rerun_state_machine_state)\b.*")
_PREDICTION = re.compile(r"mtp\..*")


def step_folder(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of tensors of a Megatron-Core run (its latest step) or step; None: neither.

    Raises:
        ValueError: The run names a step that does not exist or lacks a file, or the step has another format than
            `torch_dist`.
    """
    folder = Path(path)
    if (tracker := folder / TRACKER).is_file():
        # Bytes that are no text are shown in the error.
        latest = tracker.read_bytes().decode("utf-8", "backslashreplace").strip()
        folder /= latest if latest == RELEASE else f"iter_{latest.zfill(7)}"
        if not folder.is_dir():
            raise ValueError(f"{tracker} names {latest!r}, and {folder} does not exist; copy the step, or pass another")
    if missing := [name for name in (METADATA, MEGATRON_FORMAT) if not (folder / name).is_file()]:
        if folder != Path(path) and any(folder.glob("*.distcp")):
            raise ValueError(
                f"{folder} lacks {' and '.join(missing)}; copy the missing file, or save the step with Megatron-LM's "
                "--ckpt-format torch_dist"
            )
        return None
    if (backend := read_json_file(folder / MEGATRON_FORMAT).get("sharded_backend")) != "torch_dist":
        raise ValueError(f"{folder} has the format {backend!r}; save it with Megatron-LM's --ckpt-format torch_dist")
    return folder


class MegatronStep(NamedTuple):
    """The tensors of a step: the index of all, and the layout and the blocks of the weights by stored names."""

    stored: Mapping[str, StoredTensor]
    layout: Layout
    blocks: Mapping[str, Block]


def open_megatron(
    folder: Path, layout: Layout | None = None, copy_from: str | os.PathLike[str] | None = None
) -> Source:
    """Open the weights of a step's folder; optimizer state and random states are left out.

    Args:
        folder: From `step_folder`.
        layout: The layout of the model, on any target; None: the layout of the config.json in the step's folder, the
            run's folder or `copy_from`, in the role that the head shows.
        copy_from: A Hugging Face folder of the model.

    Raises:
        ValueError: There is no config.json, a file is missing or damaged, or the tensors are of another model; names
            the tensor and the fix.
    """
    step = open_megatron_step(folder, layout, copy_from)
    files = stored_files(step.stored, step.blocks, folder)
    return Source(files.headers, files.tensors, files.pieces, layout=step.layout)


def open_megatron_step(folder: Path, layout: Layout | None, copy_from: str | os.PathLike[str] | None) -> MegatronStep:
    """Read the index of a step's folder; see `open_megatron`."""
    index = read_index(folder)
    if EMBEDDING not in index:
        raise ValueError(f"{folder} holds no {EMBEDDING}; pass a checkpoint of a Megatron-Core GPTModel")
    if layout is None:
        head = index.get(HEAD)
        layout = layout_for(_config_of(folder, copy_from), role="value" if head and head.shape[0] == 1 else "causal_lm")
        towers = {name: entry.shape for name, entry in index.items() if name.startswith(layout.family.carried_prefixes)}
        layout = dataclasses.replace(layout, carried=towers)
        if lost := layout.missing_carried():
            raise ValueError(f"{folder} lacks {len(lost)} tensors of the vision tower: {lost[:3]}; it has text alone")
    target, blocks = _matching_blocks(index, layout, folder)
    return MegatronStep(index, dataclasses.replace(layout, target=target, prediction_layers=0), blocks)


def stored_files(index: Mapping[str, StoredTensor], blocks: Mapping[str, Block], folder: Path) -> TensorFiles:
    """Return the stored tensors that have blocks, as pieces of the tensors that the blocks name.

    Raises:
        ValueError: A file is missing or damaged, or the files do not hold all of a tensor.
    """
    files, reader = TensorFiles(), ChunkReader()
    infos: dict[Path, dict[str, TensorInfo]] = {}
    for name, block in blocks.items():
        for chunk in index[name].chunks:
            key = f"{name}@{','.join(str(start) for start, _ in chunk.box)}"
            info = infos.setdefault(chunk.path, {})[key] = reader.locate(name, index[name], chunk)
            files.tensors[key] = (chunk.path, info)
            for piece in block.part(chunk.box).pieces:
                if not piece.is_padding:
                    files.pieces.setdefault(piece.name, []).append((key, piece))
        if problem := cover_problem([chunk.box for chunk in index[name].chunks], index[name].shape):
            raise ValueError(f"{folder} does not hold all of {name}: {problem}; a rank has not saved its part")
    files.headers = {path: Header(tensors, 0, path.stat().st_mtime_ns, {}) for path, tensors in infos.items()}
    return files


def _config_of(folder: Path, copy_from: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    places = [folder, folder.parent, *([] if copy_from is None else [Path(copy_from)])]
    place = next((place for place in places if (place / CONFIG).is_file()), None)
    if place is None:
        raise ValueError(
            f"{folder} has no {CONFIG}, which says what model it holds; give a Hugging Face folder of the model with "
            "--copy-from (copy_from= in Python)"
        )
    return load_config(place)


def _matching_blocks(
    index: Mapping[str, StoredTensor], layout: Layout, folder: Path
) -> tuple[Target, dict[str, Block]]:
    """Return the kind of names that fits the index, and the blocks of the tensors that are read."""
    misfits: list[tuple[int, str]] = []
    targets: tuple[Target, Target] = ("megatron_te", "megatron")
    for target, homogeneous in itertools.product(targets, (False, True)):
        try:
            blocks = stored_blocks(layout, target, rows=index[EMBEDDING].shape[-2], homogeneous=homogeneous)
        except ValueError:
            if not homogeneous:  # Megatron-Core has no such model; layers of several kinds are not stacked
                raise
            continue
        held = {name: block for name, block in blocks.items() if name in index and index[name].shape == block.shape}
        absent = [name for name, block in blocks.items() if name not in held and not layout.is_optional(block)]
        if not absent:
            _refuse_others(index, held, layout, folder)
            return target, held
        name = absent[0]
        stored = f"has shape {index[name].shape} instead of {blocks[name].shape}" if name in index else "is missing"
        misfits.append((len(absent), f"{len(absent)} tensors of config.json do not fit: {name} {stored}"))
    raise ValueError(
        f"{folder} holds another model than its config.json: {min(misfits)[1]}; give the model's own folder"
    )


def _refuse_others(index: Mapping[str, StoredTensor], held: Mapping[str, Block], layout: Layout, folder: Path) -> None:
    """Refuse tensors that no read takes; warn about layers of multi-token prediction."""
    others = [name for name in index if name not in held and not _OTHER_STATE.fullmatch(name)]
    if layout.role == "value":
        others = [name for name in others if name != HEAD]
    predicting = [name for name in others if _PREDICTION.fullmatch(name)]
    if predicting:
        warnings.warn(f"the {len(predicting)} tensors of multi-token prediction in {folder} are left out", stacklevel=4)
    if unread := [name for name in others if name not in predicting]:
        raise ValueError(
            f"{folder} holds {len(unread)} tensors that its config.json does not describe: {', '.join(unread[:3])}; "
            "give the model's own folder"
        )
