"""A step of a training run as a step of Megatron-Core, optimizer state included, and back; through a bounded buffer.

Megatron-Core's distributed optimizer stores, beside a weight NAME, `optimizer.state.exp_avg.NAME`,
`optimizer.state.exp_avg_sq.NAME` and the master weight `optimizer.state.param.NAME` ("fully_reshardable"), all in fp32.
Its step count is the number of the step. Parameter groups, schedules and random states are not converted: the program
that loads has its own.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ckpt.files.atomic import FolderWriter
from ckpt.files.boxio import STAGING_BYTES, Staging, write_box
from ckpt.files.contents import CONFIG, STATE
from ckpt.files.disk import room_for, while_unchanged
from ckpt.files.written_files import FilePlan, create_files, write_json
from ckpt.layout.families.table import Target
from ckpt.layout.megatron_names import stored_blocks
from ckpt.layout.pieces import Block, full_box, shapes_of, split_box
from ckpt.layout.place import Grid
from ckpt.training.opened import OpenedStep, open_training
from ckpt.training.rng import capture_rng
from ckpt.training.runs import folder_name, point_to
from ckpt.transfer.holdings import prefixed
from ckpt.transfer.megatron import locate, open_step, step_folder
from ckpt.transfer.offline import Progress
from ckpt.transfer.to_megatron import chunks_of_ranks, write_run

_STATE = "optimizer.state."
# The slots of AdamW and the master weights -> their names in Megatron-Core.
_SLOTS = {"exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "master": ("param", "fp32_param")}


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
    if not {"step", "exp_avg", "exp_avg_sq"} <= {*opened.slots}:
        raise ValueError(
            f"{opened.folder} has the optimizer state {opened.slots}, and Megatron-Core's AdamW has exp_avg and "
            "exp_avg_sq; convert the weights alone: export the model, then `ckpt convert`"
        )
    weights = stored_blocks(layout, target, rows=vocab_multiple * grid.tp)
    weights = {name: block for name, block in weights.items() if f"model/{block.names[0]}" in files.pieces}
    blocks = {name: prefixed(block, "model/") for name, block in weights.items()}
    dtypes = {name: files.stored_dtype(block.names[0]) for name, block in blocks.items()}
    for name, block in weights.items():
        trained = [f"optimizer/exp_avg/{source}" in files.pieces for source in block.names]
        if any(trained) != all(trained):
            raise ValueError(f"{name} joins trained and frozen tensors, {', '.join(block.names)}; train all or none")
        for slot, (stored, *_) in _SLOTS.items() if all(trained) else ():
            # fp32 weights are their own master weights.
            held = f"optimizer/{slot}/{block.names[0]}" in files.pieces
            prefix = f"optimizer/{slot}/" if held else "model/"
            blocks[f"{_STATE}{stored}.{name}"] = prefixed(block, prefix)
    dtypes |= dict.fromkeys(blocks.keys() - dtypes.keys(), torch.float32)
    ranks = [
        [(stored, box) for name, box in rank for stored in (name, *_states_of(name, blocks))]
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


def _states_of(name: str, blocks: Mapping[str, Block]) -> list[str]:
    states = [f"{_STATE}{stored}.{name}" for names in _SLOTS.values() for stored in names]
    return [state for state in states if state in blocks]


def _step_count(opened: OpenedStep) -> int:
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
            has a step of that number.
        OSError: The disk is full.
    """
    folder = step_folder(source)
    number = None if folder is None else re.fullmatch(r"(?:iter_|step-)(\d+)", folder.resolve().name)
    if folder is None or number is None:
        raise ValueError(f"{source} is no run or step (iter_0000100) of Megatron-Core with optimizer state; pass one")
    step = int(number[1])
    opened = open_step(folder, None, copy_from)
    blocks = {name: prefixed(block, "model/") for name, block in opened.blocks.items()}
    for name, block in opened.blocks.items():
        for slot, names in _SLOTS.items():
            states = [state for state in (f"{_STATE}{stored}.{name}" for stored in names) if state in opened.stored]
            if states and (slot != "master" or opened.stored[name].dtype != torch.float32):
                blocks[states[0]] = prefixed(block, f"optimizer/{slot}/")
            if states and opened.stored[states[0]].shape != block.shape:
                raise ValueError(f"{states[0]} has shape {opened.stored[states[0]].shape}: {_OTHER_FORM}")
    if len(blocks) == len(opened.blocks):
        raise ValueError(f"{folder} has no optimizer state by weights: {_OTHER_FORM}")
    files = locate(opened.stored, blocks, folder)
    shapes = shapes_of(piece for block in blocks.values() for piece in block.pieces)
    contents = {f"{name}@{','.join('0' for _ in shape)}": (name, shape) for name, shape in shapes.items()}
    counts = [name.replace("/exp_avg/", "/step/") + "@" for name in files.pieces if "optimizer/exp_avg/" in name]
    plan = FilePlan(
        {
            "rank-00000.safetensors": {
                **{key: (files.stored_dtype(name), shape) for key, (name, shape) in contents.items()},
                **dict.fromkeys(counts, (torch.float32, ())),
            }
        }
    )
    root, staging, done = Path(destination), Staging(), 0
    if (root / folder_name(step)).exists():
        raise ValueError(f"{root / folder_name(step)} exists; choose another folder, or remove the step")
    with room_for(plan.nbytes, root), FolderWriter(root / folder_name(step)) as out, while_unchanged(files.files):
        create_files(out, plan)
        with open(out / "rank-00000.safetensors", "r+b", buffering=0) as file:
            for key, (name, shape) in contents.items():
                _, info = plan.tensors[key]
                for box in split_box(full_box(shape), STAGING_BYTES // info.dtype.itemsize):
                    write_box(file.fileno(), info, box, files.values(name, box, info.dtype), staging)
                done += info.nbytes
                if progress is not None:
                    progress(done, plan.nbytes)
            for key in counts:
                write_box(file.fileno(), plan.tensors[key][1], (), torch.tensor(float(step)), staging)
        plan.complete(out)
        write_json(out / CONFIG, opened.layout.config)
        extra = {"steps": step, "extra": {}}  # as parallel_models saves them
        write_json(out / STATE, {"step": step, "extra": extra, "rng": [capture_rng()], "files": [*plan.contents]})
    point_to(root, folder_name(step))


_OTHER_FORM = (
    "the form is bound to a grid; load it in Megatron, and save it with --dist-ckpt-optim-fully-reshardable "
    "(distrib_optim_sharding_type='fully_reshardable')"
)
