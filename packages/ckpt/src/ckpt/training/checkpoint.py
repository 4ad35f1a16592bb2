"""Save training checkpoints under canonical names on one grid, and resume them on any other.

`ROOT/step-00000100/` holds weights and optimizer state (`ckpt.training.boxes`), random-number states and the caller's
JSON. `ROOT/latest` names the newest complete checkpoint and is replaced in one step.
"""

import contextlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.atomic import check_target, remove_abandoned
from ckpt.files.contents import CONFIG, STATE
from ckpt.files.disk import room_for, while_unchanged
from ckpt.files.locks import Lock
from ckpt.files.tensor_bytes import check_bytes
from ckpt.files.written_files import write_json
from ckpt.layout.config import read_json_file
from ckpt.layout.model_layout import Layout
from ckpt.layout.place import is_integer
from ckpt.training.boxes import open_boxes, write_boxes
from ckpt.training.rng import capture_rng, check_states, state_of_rank, streams_from_json, streams_to_json
from ckpt.training.runs import LATEST, folder_name, latest_step, point_to, prune, saved_steps
from ckpt.training.state import OptimizerState, WantedState, local_state, wanted_state
from ckpt.transfer.agreement import agree, agree_on_first, all_gather_json, rank_in, require_same
from ckpt.transfer.holdings import HeldPiece, LocalParts, Places, gather_holdings
from ckpt.transfer.parallel_reads import read_all
from ckpt.transfer.tensor_files import TensorFiles
from ckpt.transfer.tied import require_equal_copies
from ckpt.transfer.writing import new_folder

# The entries of `state.json`.
_FACTS = {"step", "extra", "rng", "files"}


@dataclass
class TrainingState:
    """The state of one place in a training checkpoint.

    Attributes:
        step: The step of the save.
        tensors: Local name -> weights; for a DTensor, this rank's part.
        optimizer: Local name -> slot -> tensor, divided like the weights.
        extra: The JSON values that the caller saved.
        rng: This rank's random-number states, for `restore_rng`.
        streams: This rank's states of the caller's own generators, on the CPU.
    """

    step: int
    tensors: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    extra: dict[str, Any]
    rng: dict[str, Any]
    streams: dict[str, Tensor]


@dataclass
class PendingSave:
    """A save that may still be running; `wait` returns when the save is complete, and raises its error.

    A RuntimeWarning reports an error that no `wait` has raised, at the latest at the end of the program.
    """

    _thread: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)
    _unseen: "weakref.finalize[..., PendingSave] | None" = None

    @property
    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the save.

        Raises:
            TimeoutError: The save is still running after `timeout` seconds.
            ValueError, OSError: The error of the save, on every rank.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the save is still running after {timeout} s")
        if self._unseen is not None:
            self._unseen.detach()
        if self._errors:
            raise self._errors[0]


def _tell(step: int, failures: Sequence[str]) -> None:
    for failure in failures:
        warnings.warn(
            f"the save of step {step} in the background has failed, and nothing waited for it: {failure}. Wait for a "
            "save before the process group is destroyed, and before the program ends",
            RuntimeWarning,
            stacklevel=2,
        )


def save_training(
    root: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, Tensor],
    layout: Layout,
    place: Places = None,
    *,
    optimizer: OptimizerState | None = None,
    extra: Mapping[str, Any] | None = None,
    streams: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Save a training run's state; one of the ranks that hold a box writes the box.

    With `asynchronous`, this returns once the tensors are copied to CPU memory, and a thread does the rest. Its
    collectives need a separate group: pass `torch.distributed.new_group(backend="gloo")`. Wait for a save before
    starting the next one, and before destroying the group.

    Args:
        root: The run's folder of checkpoints.
        step: The step that is complete.
        tensors: This rank's weights by local name; DTensors under FSDP2.
        layout: From `layout_for`.
        place: This rank's place, or the places of its pipeline chunks, whose local names must differ; None: everything.
        optimizer: Local name -> slot -> tensor of the parameter's shape, of the shape of this rank's part, or of one
            element.
        extra: JSON values of scheduler, data position, configuration; rank 0's are saved.
        streams: The states of this rank's own generators by name, as `parallel_layers.memory.RngStates.state_dict`
            returns them. The default generators of torch and Python are always saved.
        group: The ranks that together hold the model.
        keep: The number of checkpoints to keep: the newest up to this step, then later steps of a run that was left by
            going back; None: all.
        asynchronous: Copy the tensors, then save in the background.

    Returns:
        The save; complete unless `asynchronous`.

    Raises:
        ValueError: Tensors do not fit the layout, the ranks together lack a part, a weight is NaN or infinite, or the
            copies of a tied embedding, or of its optimizer state, differ between pipeline stages; on every rank.
        OSError: The disk is full; on every rank. Older checkpoints and `latest` are intact. If only the sync of
            `latest` or the pruning failed, `latest` names the new, complete checkpoint.
    """

    def prepare() -> tuple[LocalParts, dict[str, Any], dict[str, Any]]:
        if keep is not None and not (is_integer(keep) and keep >= 1):
            raise ValueError(f"keep={keep!r} must be an integer of at least 1, or None to keep all")
        if not is_integer(step) or step < 0:
            raise ValueError(f"step={step!r} must be an integer of at least 0")
        rng = {**capture_rng(), "streams": streams_to_json(streams or {})}
        return local_state(tensors, optimizer or {}, layout, place), _copied(extra or {}), rng

    parts, copied, rng = agree(prepare, group)
    require_same(group, layout=layout.fingerprint, step=step, keep=keep)
    state = {"step": step, "extra": copied, "rng": all_gather_json(rng, group)}
    if not asynchronous:
        _write(Path(root), parts, layout, state, group, keep)
        return PendingSave()
    copies = [
        (at, {name: (tensor.to("cpu", copy=True), box) for name, (tensor, box) in held.items()}) for at, held in parts
    ]
    pending = PendingSave()
    failures: list[str] = []  # texts only: the errors themselves hold the copied tensors

    def run() -> None:
        try:
            _write(Path(root), copies, layout, state, group, keep)
        except BaseException as error:  # Every error is the waiting caller's.
            pending._errors.append(error)
            failures.append(f"{type(error).__name__}: {error}")

    # The finalizer runs after the thread ends, because the thread holds `pending`, and a program waits for its threads.
    pending._unseen = weakref.finalize(pending, _tell, step, failures)
    pending._thread = threading.Thread(target=run, name=f"save-step-{step}")
    pending._thread.start()
    return pending


def _copied(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the caller's values as JSON values; training may change the originals meanwhile."""
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra={extra!r:.100} must be a mapping of names to JSON values, such as {{'epoch': 1}}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra must be made of JSON values: {error}") from None
    return copied


def _write(
    root: Path,
    parts: LocalParts,
    layout: Layout,
    state: dict[str, Any],
    group: ProcessGroup | None,
    keep: int | None,
) -> None:
    holdings = gather_holdings(parts, layout, group, "model/").with_tensors(parts)
    require_equal_copies(holdings, layout, group)

    target = root / folder_name(state["step"])
    room = room_for(holdings.nbytes, root)
    with contextlib.ExitStack() as stack:

        @room
        def prepare() -> dict[str, list[HeldPiece]]:
            if holdings.rank == 0:
                check_target(target)
                root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(Lock(root / LATEST, f"saves a training checkpoint to {root}"))
                # The leftovers of killed saves of any step.
                remove_abandoned(root.glob(".step-*.saving-*"))
            return holdings.assign_owners()

        owners = agree(prepare, group)
        with new_folder(target, room, group) as folder:
            files = write_boxes(folder, owners, holdings, group, room)

            @room
            def describe() -> None:
                write_json(folder / CONFIG, layout.config)
                write_json(folder / STATE, {**state, "files": files})

            agree_on_first(describe, group)

        @room
        def point() -> None:
            point_to(root, target.name)
            prune(root, keep)

        agree_on_first(point, group)


def load_training(
    root: str | os.PathLike[str],
    layout: Layout,
    place: Places = None,
    *,
    step: int | None = None,
    into: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
    check: bool = False,
) -> TrainingState:
    """Load a place's part of a training checkpoint that was saved on any grid.

    Args:
        root: The run's folder of checkpoints.
        layout: The layout of this run: the same model, on any target.
        place: This rank's place, or the places of its pipeline chunks; None: everything.
        step: The step to load; None: the latest.
        into: Weights to fill instead of new tensors, by local name. For DTensors, this rank's part of the weights and
            of the optimizer state is loaded.
        device: The device of new tensors.
        group: The ranks that load together.
        check: Compare the bytes of all files with their recorded checksums first; the ranks divide the files.

    Returns:
        The state. `rng` and `streams` come from the same rank of the saved run. A rank beyond the saved ranks gets
        new states, derived from a saved rank's; states that all saved ranks shared stay shared.

    Raises:
        ValueError: The checkpoint is absent, broken, damaged, of another model, or was replaced meanwhile; on every
            rank.
    """
    rank = rank_in(group)
    folder, state, files = agree(lambda: open_step(Path(root), step), group)
    # On a network file system ranks may see different pointers.
    require_same(group, step=state["step"])

    def prepare() -> tuple[TensorFiles, WantedState]:
        with while_unchanged(files):
            stored = open_boxes(folder, state["files"])
            if check:
                check_bytes(stored.headers, rank, 1 if group is None else group.size())
            return stored, wanted_state(stored, layout, place, into, torch.device(device), folder)

    stored, wanted = agree(prepare, group)

    def read() -> None:
        with while_unchanged(files):
            reads = (read for tensor, block in wanted.blocks for read in stored.reads(tensor, block))
            read_all(reads)
        wanted.settle_counts()

    agree(read, group)
    rng = agree(lambda: state_of_rank(state["rng"], rank), group)
    streams = streams_from_json(rng.pop("streams", {}))
    return TrainingState(state["step"], wanted.tensors, wanted.optimizer, state["extra"], rng, streams)


def open_step(root: Path, step: int | None) -> tuple[Path, dict[str, Any], dict[Path, int]]:
    """Open a run's checkpoint of a step (None: the latest) and check its state.json.

    Returns:
        The folder, the content of state.json, and the time of that file's last change, which a new save alters.

    Raises:
        ValueError: The run has no such checkpoint, or its state.json is malformed or lists other files than there are.
    """
    chosen = latest_step(root) if step is None else step
    if chosen is None or chosen not in saved_steps(root):
        if step is None:
            raise ValueError(f"{root} has no training checkpoint; give the folder of save_training")
        raise ValueError(f"{root} has no checkpoint of step {step}; it has {saved_steps(root)}")
    folder = root / folder_name(chosen)
    files = {folder / STATE: os.stat(folder / STATE).st_mtime_ns}
    state = read_json_file(folder / STATE)
    if not state.keys() >= _FACTS:
        raise ValueError(f"{folder / STATE} is malformed: it must hold {sorted(_FACTS)}")
    step_fits = type(state["step"]) is int and state["step"] >= 0
    if not step_fits or not isinstance(state["extra"], dict) or not isinstance(state["files"], list):
        raise ValueError(
            f"{folder / STATE} is malformed: step must be a number of steps, extra an object, and files a list"
        )
    odd = sorted(
        {path.name for path in folder.glob("rank-*.safetensors")}.symmetric_difference(map(str, state["files"]))
    )
    if odd:
        raise ValueError(
            f"{folder / STATE} lists other files than the folder holds: {odd[:3]} ({len(odd)}) are missing or "
            "unexpected; restore the folder from a copy, or load another step"
        )
    try:
        check_states(state["rng"])
    except ValueError as error:
        raise ValueError(f"{folder / STATE} is malformed: {error}") from None
    return folder, state, files
