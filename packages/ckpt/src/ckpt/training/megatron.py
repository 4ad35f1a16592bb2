"""A step of a training run as a step of Megatron-Core, optimizer state included, and back; through a bounded buffer.

Megatron-Core's distributed optimizer stores, beside a weight NAME, `optimizer.state.exp_avg.NAME`,
`optimizer.state.exp_avg_sq.NAME` and the master weight `optimizer.state.param.NAME` ("fully_reshardable"), all in fp32.
Its step count is the number of the step. Parameter groups, schedules and random states are not converted: the program
that loads has its own.
"""

import dataclasses
import os
import re
import warnings
from collections.abc import Container, Mapping
from pathlib import Path

import torch

from ckpt.files.atomic import FolderWriter, check_target
from ckpt.files.boxio import STAGING_BYTES, Staging, write_box
from ckpt.files.contents import CONFIG, STATE, refuse_distributed
from ckpt.files.disk import room_for, while_unchanged
from ckpt.files.locks import Lock
from ckpt.files.written_files import FilePlan, create_files, write_json
from ckpt.layout.config import Config
from ckpt.layout.families.table import Target
from ckpt.layout.megatron_names import stored_blocks
from ckpt.layout.pieces import Block, full_box, shapes_of, split_box
from ckpt.layout.place import Grid
from ckpt.training.rng import capture_rng
from ckpt.training.runs import LATEST, folder_name, latest_step, point_to
from ckpt.training.saved_step import SavedStep, open_training
from ckpt.transfer.holdings import prefixed
from ckpt.transfer.megatron import open_megatron_step, step_folder, stored_files
from ckpt.transfer.offline import Progress
from ckpt.transfer.tensor_files import TensorFiles
from ckpt.transfer.to_megatron import chunks_of_ranks, write_run

_STATE = "optimizer.state."
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Our slots -> their names in Megatron-Core; `fp32_param` is the name where the optimizer is not distributed.
_STORED = {**{moment: (moment,) for moment in _MOMENTS}, "master": ("param", "fp32_param")}
_FILE = "rank-00000.safetensors"


def training_to_megatron(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    grid: Grid | None = None,
    *,
    target: Target = "megatron_te",
    vocab_multiple: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write a step of a training run (`save_training`) as a run of Megatron-Core with its optimizer state.

    Args:
        source: The run's folder (its latest step), or a step's folder.
        destination: The folder to write; an existing run with numbered steps is refused.
        grid: As in `to_megatron`.
        target: As in `to_megatron`.
        vocab_multiple: As in `to_megatron`.
        progress: As in `to_megatron`.

    Raises:
        ValueError: The step is broken or has no AdamW state, a part of a fused weight is frozen, weights have been
            trained for different numbers of steps, or Megatron-Core has no such model.
        OSError: The disk is full.
    """
    opened, grid = open_training(source), Grid() if grid is None else grid
    files, layout = opened.files, opened.layout
    if {*opened.slots} - {"master"} != {"step", *_MOMENTS}:
        raise ValueError(
            f"{opened.folder} has the optimizer state {opened.slots}, and Megatron-Core's AdamW has exp_avg and "
            "exp_avg_sq; convert the weights alone: export the model, then `ckpt convert`"
        )
    weights = stored_blocks(layout, target, rows=vocab_multiple * grid.tp)
    weights = {name: block for name, block in weights.items() if f"model/{block.names[0]}" in files.pieces}
    _require_every_weight(opened, weights)
    blocks = {name: prefixed(block, "model/") for name, block in weights.items()}
    dtypes = {name: files.stored_dtype(block.names[0]) for name, block in blocks.items()}
    for name, block in weights.items():
        blocks |= _state_blocks(name, block, files)
    dtypes |= dict.fromkeys(blocks.keys() - dtypes.keys(), torch.float32)
    ranks = [
        [(stored, box) for name, box in rank for stored in (name, *_stored_states(name, blocks).values())]
        for rank in chunks_of_ranks(layout, weights, grid, target, vocab_multiple)
    ]
    with while_unchanged(opened.modified):
        write_run(
            files,
            blocks,
            dtypes,
            ranks,
            Path(destination),
            lambda folder: write_json(folder / CONFIG, layout.config),
            step=_step_count(opened),
            progress=progress,
        )


def _require_every_weight(opened: SavedStep, weights: Mapping[str, Block]) -> None:
    """Refuse a run that holds weights without a form in Megatron-Core, such as adapters; nothing is left out silently.

    Layers of multi-token prediction are left out with a warning.
    """
    converted = {name for block in weights.values() for name in block.names}
    saved = [name.removeprefix("model/") for name in opened.files.pieces if name.startswith("model/")]
    others = [name for name in saved if name not in converted]
    plain = dataclasses.replace(opened.layout, prediction_layers=0)
    predicting = opened.layout.canonical.keys() - plain.canonical.keys()
    if refused := [name for name in others if name not in predicting]:
        raise ValueError(
            f"{opened.folder} holds {len(refused)} weights that Megatron-Core has no tensor for: {refused[:3]}; merge "
            "adapters by exporting the model, and convert the weights alone"
        )
    if others:
        warnings.warn(
            f"the {len(others)} tensors of multi-token prediction in {opened.folder} are left out", stacklevel=3
        )


def _state_blocks(name: str, block: Block, files: TensorFiles) -> dict[str, Block]:
    """Return the optimizer state of a weight by stored names; fp32 weights are their own master weights.

    Raises:
        ValueError: A part of the weight is frozen, or lacks a moment.
    """
    present = [f"optimizer/{moment}/{source}" in files.pieces for source in block.names for moment in _MOMENTS]
    if not any(present):
        return {}
    if not all(present):
        raise ValueError(f"{name} joins tensors with and without AdamW state, {block.names}; train all or none of them")
    has_master = f"optimizer/master/{block.names[0]}" in files.pieces
    prefixes = {moment: f"optimizer/{moment}/" for moment in _MOMENTS}
    prefixes["master"] = "optimizer/master/" if has_master else "model/"
    return {f"{_STATE}{_STORED[slot][0]}.{name}": prefixed(block, prefix) for slot, prefix in prefixes.items()}


def _stored_states(name: str, names: Container[str]) -> dict[str, str]:
    """Return the stored names of a weight's optimizer state that are among `names`, by slot."""
    states = ((slot, f"{_STATE}{stored}.{name}") for slot, forms in _STORED.items() for stored in forms)
    return {slot: state for slot, state in states if state in names}


def _step_count(opened: SavedStep) -> int:
    """Return the number of steps of the optimizer, which all weights have in common."""
    names = [name for name in opened.files.pieces if name.startswith("optimizer/step/")]
    counts = {int(opened.files.values(name, (), torch.float32)) for name in names}
    if len(counts) > 1:
        raise ValueError(
            f"{opened.folder} has weights of {sorted(counts)} steps, and Megatron-Core has one count for all"
        )
    return counts.pop()


def megatron_to_training(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    copy_from: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step of Megatron-Core, optimizer state included, as a step of a training run for `load_training`.

    Args:
        source: A run's folder (its latest step), or the folder of a step, `iter_0000100` or megatron-utils' `step-100`,
            saved "fully reshardable", as by Megatron-LM's --dist-ckpt-optim-fully-reshardable.
        destination: The folder of the training run, to which the step is added.
        copy_from: A Hugging Face folder of the model, whose config.json counts where Megatron's step has none.
        progress: As in `reshard`.

    Raises:
        ValueError: The source is no such step, has no optimizer state or a state in another form, or the destination
            has a step of that number or a later one, or another process saves there.
        OSError: The disk is full.
    """
    if not os.path.isdir(source):
        raise ValueError(f"{source} is no folder; pass a run or a step (iter_0000100) of Megatron-Core")
    if (folder := step_folder(source)) is None:
        refuse_distributed(Path(source))
    number = None if folder is None else re.fullmatch(r"(?:iter_|step-)(\d+)", folder.resolve().name)
    if folder is None or number is None:
        raise ValueError(f"{source} is no run or step (iter_0000100) of Megatron-Core with optimizer state; pass one")
    step = int(number[1])
    opened = open_megatron_step(folder, None, copy_from)
    blocks = {name: prefixed(block, "model/") for name, block in opened.blocks.items()}
    read = set(blocks)
    for name, block in opened.blocks.items():
        states = _stored_states(name, opened.stored)
        read |= {*states.values()}
        if wrong := [state for state in states.values() if opened.stored[state].shape != block.shape]:
            raise ValueError(f"{wrong[0]} has shape {opened.stored[wrong[0]].shape}: {_OTHER_FORM}")
        if states and not {*_MOMENTS} <= states.keys():
            raise ValueError(f"{folder} holds of {name} the state {[*states]} alone: {_OTHER_FORM}")
        if opened.stored[name].dtype == torch.float32:
            states.pop("master", None)  # fp32 weights are their own master weights
        blocks |= {state: prefixed(block, f"optimizer/{slot}/") for slot, state in states.items()}
    others = [name for name in opened.stored if "optimizer." in name and ".mtp." not in name and name not in read]
    if others:
        raise ValueError(f"{folder} holds optimizer state of no weight, {others[:2]}: {_OTHER_FORM}")
    if len(blocks) == len(opened.blocks):
        raise ValueError(f"{folder} has no optimizer state by weights: {_OTHER_FORM}")
    files = stored_files(opened.stored, blocks, folder)
    root, target = Path(destination), Path(destination) / folder_name(step)
    check_target(target)
    root.mkdir(parents=True, exist_ok=True)
    with Lock(root / LATEST, f"saves a training checkpoint to {root}"):
        if target.exists():
            raise ValueError(f"{target} exists; choose another folder, or remove the step")
        if (latest := latest_step(root)) is not None and latest > step:
            raise ValueError(f"{root} is at step {latest}, and {folder} is step {step}; choose another folder")
        _write_step(root, step, files, blocks, opened.layout.config, progress)


def _write_step(
    root: Path, step: int, files: TensorFiles, blocks: Mapping[str, Block], config: Config, progress: Progress | None
) -> None:
    """Write the tensors of `files` and the count of steps as a step of a run."""
    shapes = shapes_of(piece for block in blocks.values() for piece in block.pieces)
    names = {f"{name}@{','.join('0' for _ in shape)}": name for name, shape in shapes.items()}
    counts = [name.replace("/exp_avg/", "/step/") + "@" for name in shapes if name.startswith("optimizer/exp_avg/")]
    contents = {key: (files.stored_dtype(name), shapes[name]) for key, name in names.items()}
    plan = FilePlan({_FILE: {**contents, **dict.fromkeys(counts, (torch.float32, ()))}})
    staging, done = Staging(), 0
    with room_for(plan.nbytes, root), FolderWriter(root / folder_name(step)) as out, while_unchanged(files.files):
        create_files(out, plan)
        with open(out / _FILE, "r+b", buffering=0) as file:
            for key, name in names.items():
                _, info = plan.tensors[key]
                for box in split_box(full_box(shapes[name]), STAGING_BYTES // info.dtype.itemsize):
                    write_box(file.fileno(), info, box, files.values(name, box, info.dtype), staging)
                done += info.nbytes
                if progress is not None:
                    progress(done, plan.nbytes)
            for key in counts:
                write_box(file.fileno(), plan.tensors[key][1], (), torch.tensor(float(step)), staging)
        plan.complete(out)
        write_json(out / CONFIG, config)
        extra = {"steps": step, "extra": {}}  # as parallel_models saves them
        write_json(out / STATE, {"step": step, "extra": extra, "rng": [capture_rng()], "files": [_FILE]})
    point_to(root, folder_name(step))


_OTHER_FORM = (
    "the form is bound to a grid; load it in Megatron, and save it with --dist-ckpt-optim-fully-reshardable "
    "(distrib_optim_sharding_type='fully_reshardable')"
)
