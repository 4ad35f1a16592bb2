"""Training checkpoints under canonical names: saved on one grid, resumed on any other.

`ROOT/step-00000100/` holds weights, optimizer state, random-number states and whatever JSON the caller adds;
`ROOT/latest` names the newest complete one and is replaced in one step. Weights and optimizer state are boxes of
canonical tensors, stored through torch.distributed.checkpoint (`ckpt.dcp`), so each rank writes its own part and reads
what its new place needs. Of a DTensor, as FSDP2 makes of a place's tensors, a rank holds a box; it is saved and loaded
as such, without a gather.
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt.agreement import agree, all_gather_json
from ckpt.atomic import FolderWriter
from ckpt.boxio import IOCounter, view_of
from ckpt.config import read_json_file
from ckpt.dcp import BoxLoadPlanner, BoxOf, BoxSavePlanner, SafetensorsReader, SafetensorsWriter, stored_tensors
from ckpt.files import write_json
from ckpt.layout import Layout
from ckpt.live import OptimizerState
from ckpt.pieces import Block, Box, extents
from ckpt.place import Place
from ckpt.rng import capture_rng
from ckpt.runs import STATE, latest_step, point_to, prune, saved_steps

# Where a rank stands; one place for each pipeline chunk that it holds.
Places = Place | Sequence[Place] | None


@dataclass
class TrainingState:
    """What a training checkpoint gives one place.

    Attributes:
        step: the step it was saved at.
        tensors: local name -> weights; of a DTensor, the part that is on this rank.
        optimizer: local name -> slot -> tensor, divided like the weights.
        extra: what the caller saved beside them.
        rng: this rank's random-number states, for `restore_rng`.
    """

    step: int
    tensors: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    extra: dict[str, Any]
    rng: dict[str, Any]


@dataclass
class PendingSave:
    """A save that may still be running; `wait` returns when it is complete and raises what went wrong."""

    _thread: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            TimeoutError: it is still running after `timeout` seconds.
            ValueError, OSError: what went wrong, on every rank.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the save is still running after {timeout} s")
        if self._errors:
            raise self._errors[0]


def save_training(
    root: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, Tensor],
    layout: Layout,
    place: Places = None,
    *,
    optimizer: OptimizerState | None = None,
    extra: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    counter: IOCounter | None = None,
) -> PendingSave:
    """Save a training run's state; of ranks that hold the same box one writes it.

    Asynchronously, this returns once the tensors have been copied to CPU memory; the rest runs in a thread, whose
    collectives need a group that nothing else uses meanwhile: pass one of its own,
    `torch.distributed.new_group(backend="gloo")`. Wait for one save before starting the next.

    Args:
        root: the run's folder of checkpoints.
        step: the step that is complete.
        tensors: this rank's weights by local name; DTensors where data parallelism has divided them further.
        layout: from `layout_for`.
        place: this rank's place, or those of its pipeline chunks, where no two use one local name; None: everything.
        optimizer: local name -> slot -> tensor: shaped like the parameter, or like its part on this rank, or one
            element.
        extra: JSON values, the same on every rank (rank 0's are kept): scheduler, data position, configuration.
        group: the ranks that together hold the model.
        keep: how many checkpoints to keep, the newest; None: all.
        asynchronous: copy, then save in the background.
        counter: is given the bytes that this rank writes.

    Returns:
        The save; without `asynchronous` it is done.

    Raises:
        ValueError: tensors do not fit the layout, or the ranks together lack a part; on every rank.
        OSError: the disk is full; older checkpoints and `latest` are intact; on every rank.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} must be at least 1, or None to keep all")
    boxes = agree(lambda: _all_boxes(tensors, optimizer or {}, layout, place), group)
    rngs = all_gather_json(capture_rng(), group)
    state = {"step": step, "extra": dict(extra or {}), "rng": rngs}
    count = IOCounter() if counter is None else counter
    if not asynchronous:
        _write(Path(root), step, boxes, layout, state, group, keep, count)
        return PendingSave()
    copies = [BoxOf(box.name, box.shape, box.box, box.memory.to("cpu", copy=True)) for box in boxes]
    pending = PendingSave()

    def run() -> None:
        try:
            _write(Path(root), step, copies, layout, state, group, keep, count)
        except BaseException as error:  # Every error is the waiting caller's.
            pending._errors.append(error)

    pending._thread = threading.Thread(target=run, name=f"save-step-{step}")
    pending._thread.start()
    return pending


def _blocks(layout: Layout, place: Places) -> dict[str, Block]:
    """The local tensors of all of a rank's chunks."""
    places = [Place()] if place is None else [place] if isinstance(place, Place) else place
    blocks: dict[str, Block] = {}
    for at in places:
        if both := sorted(blocks.keys() & layout.at(at).keys()):
            raise ValueError(f"several chunks of {list(map(str, places))} have {both[:3]}; save each chunk by itself")
        blocks |= layout.at(at)
    return blocks


def _on_this_rank(tensor: Tensor, block: Block) -> tuple[Tensor, Block]:
    """A place's tensor and its block, or a DTensor's part and the part of its block."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), block
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box: Box = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    return tensor.to_local().detach(), block.part(box)


def _all_boxes(tensors: Mapping[str, Tensor], optimizer: OptimizerState, layout: Layout, place: Places) -> list[BoxOf]:
    blocks = _blocks(layout, place)
    unknown = [name for name in (*tensors, *optimizer) if name not in blocks]
    missing = [
        name
        for name, block in blocks.items()
        if name not in tensors and not all(layout.canonical[source].optional for source in block.names)
    ]
    if unknown or missing:
        raise ValueError(
            f"the tensors at {place or Place()} do not match the layout: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    boxes: list[BoxOf] = []
    parts: dict[str, Block] = {}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != blocks[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the layout has {blocks[name].shape}")
        local, parts[name] = _on_this_rank(tensor, blocks[name])
        boxes += _boxes("model", local, parts[name], layout)
    for name, slots in optimizer.items():
        for slot, tensor in slots.items():
            whole = blocks[name] if isinstance(tensor, DTensor) else parts.get(name, blocks[name])
            local, part = _on_this_rank(tensor, whole)
            boxes += _slot_boxes(slot, local, name, part, layout)
    return boxes


def _boxes(kind: str, tensor: Tensor, block: Block, layout: Layout) -> list[BoxOf]:
    """The boxes of a tensor that is made of pieces, as views of it."""
    return [
        BoxOf(
            f"{kind}/{piece.name}",
            layout.canonical[piece.name].shape,
            piece.canonical_range,
            view_of(tensor, piece.local_range).view(extents(piece.canonical_range)),
        )
        for piece in block.pieces
        if piece.canonical_range is not None
    ]


def _slot_boxes(slot: str, tensor: Tensor, name: str, block: Block, layout: Layout) -> list[BoxOf]:
    if tuple(tensor.shape) == block.shape:
        return _boxes(f"optimizer/{slot}", tensor, block, layout)
    if tensor.numel() != 1 or "/" in slot:
        raise ValueError(
            f"{name}'s {slot} has shape {tuple(tensor.shape)}; it must be the parameter's {block.shape} or one element"
        )
    # A count goes with each canonical tensor, so that it finds its way into any other fusion of them.
    return [BoxOf(f"optimizer/{slot}/{source}", (), (), tensor.view(())) for source in block.names]


def _write(
    root: Path,
    step: int,
    boxes: list[BoxOf],
    layout: Layout,
    state: dict[str, Any],
    group: ProcessGroup | None,
    keep: int | None,
    counter: IOCounter,
) -> None:
    rank = 0 if group is None else group.rank()
    folder = root / f"step-{step:08d}"
    writer = agree(lambda: FolderWriter(folder) if rank == 0 else None, group)
    try:
        path = Path(all_gather_json(None if writer is None else str(writer.path), group)[0])
        with _torch_checkpoint(group):
            save(
                {},
                storage_writer=SafetensorsWriter(path, group, counter),
                planner=BoxSavePlanner(boxes),
                process_group=group,
                no_dist=group is None,
            )

        def finish() -> None:
            if writer is not None:
                _check_whole(path, layout)
                write_json(path / "config.json", layout.config)
                write_json(path / STATE, state)
                writer.commit()
                point_to(root, folder.name)
                prune(root, keep)

        agree(finish, group)
    finally:
        if writer is not None:
            # After a commit there is nothing left to discard.
            writer.discard()


def _check_whole(folder: Path, layout: Layout) -> None:
    stored = stored_tensors(folder)
    absent = [
        name for name, canonical in layout.canonical.items() if f"model/{name}" not in stored and not canonical.optional
    ]
    if absent:
        raise ValueError(f"no rank of the group holds {absent[:3]}; save with a group that spans the whole grid")


@contextlib.contextmanager
def _torch_checkpoint(group: ProcessGroup | None) -> Iterator[None]:
    """Turn torch's collected failures into the first rank's own error; one process alone is no reason for a warning."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (first, _trace) = min(error.failures.items(), key=lambda item: item[0])
            of = OSError if isinstance(first, OSError) else ValueError
            raise of(f"rank {rank}: {first}") from error


def load_training(
    root: str | os.PathLike[str],
    layout: Layout,
    place: Places = None,
    *,
    step: int | None = None,
    into: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
    counter: IOCounter | None = None,
) -> TrainingState:
    """Load a place's part of a training checkpoint, whatever grid it was saved on.

    Args:
        root: the run's folder of checkpoints.
        layout: of this run: the same model, on any target.
        place: this rank's place, or those of its pipeline chunks; None: everything.
        step: which checkpoint; None: the latest.
        into: weights to fill instead of new tensors, by local name; of DTensors the part on this rank is loaded, and
            that of their optimizer state.
        device: where new tensors go.
        group: the ranks that load together.
        counter: is given the bytes that this rank reads.

    Returns:
        The state. Its `rng` is that of the saved run's rank of the same number; with more ranks than were saved, they
        are handed out again from the first.

    Raises:
        ValueError: there is no such checkpoint, it is broken, or it is of another model; on every rank.
    """
    rank = 0 if group is None else group.rank()
    folder, state = agree(lambda: _open(Path(root), step), group)
    wanted = agree(lambda: _destinations(folder, layout, place, into, torch.device(device)), group)
    with _torch_checkpoint(group):
        load(
            {},
            storage_reader=SafetensorsReader(folder, IOCounter() if counter is None else counter),
            planner=BoxLoadPlanner(wanted.boxes),
            process_group=group,
            no_dist=group is None,
        )
    agree(wanted.settle_counts, group)
    rngs = state["rng"]
    return TrainingState(int(state["step"]), wanted.tensors, wanted.optimizer, state["extra"], rngs[rank % len(rngs)])


def _open(root: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    chosen = latest_step(root) if step is None else step
    if chosen is None or chosen not in saved_steps(root):
        raise ValueError(f"{root} has no checkpoint of step {step}; it has {saved_steps(root)}")
    folder = root / f"step-{chosen:08d}"
    return folder, read_json_file(folder / STATE)


@dataclass
class _Wanted:
    """What a place is to load: tensors, and the boxes that fill them.

    Attributes:
        counts: (local name, slot) -> the one-element state of each canonical tensor that the parameter joins.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    counts: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    boxes: list[BoxOf] = field(default_factory=list)

    def settle_counts(self) -> None:
        """Give every parameter its one count.

        Raises:
            ValueError: the canonical tensors that a parameter joins have different ones.
        """
        for (name, slot), values in self.counts.items():
            if not torch.equal(values, values[:1].expand_as(values)):
                raise ValueError(f"the {slot} of the tensors fused in {name} differ: {values.tolist()}")
            self.optimizer.setdefault(name, {})[slot] = values[0].clone()


def _destinations(
    folder: Path, layout: Layout, place: Places, into: Mapping[str, Tensor] | None, device: torch.device
) -> _Wanted:
    stored = stored_tensors(folder)
    slots = sorted({name.split("/")[1] for name in stored if name.startswith("optimizer/")})
    wanted = _Wanted()
    for name, block in _blocks(layout, place).items():
        if all(layout.canonical[source].optional and f"model/{source}" not in stored for source in block.names):
            continue
        wanted.tensors[name], part = _weight(name, block, stored, into, device)
        wanted.boxes += _boxes("model", wanted.tensors[name], part, layout)
        for slot in slots:
            keys = [f"optimizer/{slot}/{source}" for source in block.names]
            if not all(key in stored for key in keys):
                continue
            dtype, shape = stored[keys[0]]
            if shape == layout.canonical[block.names[0]].shape:
                moment = torch.zeros(part.shape, dtype=dtype, device=device)
                wanted.optimizer.setdefault(name, {})[slot] = moment
                wanted.boxes += _boxes(f"optimizer/{slot}", moment, part, layout)
            else:
                values = torch.zeros(len(keys), dtype=dtype)
                wanted.counts[name, slot] = values
                wanted.boxes += [BoxOf(key, (), (), value) for key, value in zip(keys, values, strict=True)]
    return wanted


def _weight(
    name: str,
    block: Block,
    stored: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    into: Mapping[str, Tensor] | None,
    device: torch.device,
) -> tuple[Tensor, Block]:
    absent = [source for source in block.names if f"model/{source}" not in stored]
    if absent:
        raise ValueError(f"the training checkpoint is of another model: it lacks {absent[:3]}")
    if into is None:
        return torch.zeros(block.shape, dtype=stored[f"model/{block.names[0]}"][0], device=device), block
    if name not in into or tuple(into[name].shape) != block.shape:
        found = "is missing" if name not in into else f"has shape {tuple(into[name].shape)}"
        raise ValueError(f"into[{name!r}] {found}; the layout has {block.shape}")
    tensor, part = _on_this_rank(into[name], block)
    for piece in part.pieces:
        if piece.is_padding:
            view_of(tensor, piece.local_range).zero_()
    return tensor, part
