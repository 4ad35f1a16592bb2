"""`save_checkpoint` and `load_checkpoint`: training state that moves between grids and survives a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_utils.dist_checkpointing import folder as folders
from megatron_utils.dist_checkpointing.entry_script import check_entry_script
from megatron_utils.dist_checkpointing.index import read_index
from megatron_utils.dist_checkpointing.state import (
    METADATA,
    load_optimizer,
    load_random_streams,
    optimizer_numbers,
    prime,
    sharded_state,
    unsaved,
)
from megatron_utils.dist_checkpointing.tensor_files import load_tensors, save_tensors
from megatron_utils.grid import MegatronGrid
from megatron_utils.optimizer.build import Optimizer

T = TypeVar("T")


class Loaded(NamedTuple):
    """The numbers that `load_checkpoint` found beside the tensors."""

    step: int
    extra: dict[str, Any]
    """The values that the caller gave to `save_checkpoint`."""
    random_restored: bool
    """Whether random streams were restored. Each rank has its own streams, so only the grid that saved them can."""


class PendingSave:
    """An asynchronous save under way. Every rank calls `poll` or `wait`, in the same order."""

    under_way: PendingSave | None = None
    """The pending save of this process, at most one: Megatron's writing processes report to one queue of
    this process, where a second save would find the reports of the first."""

    def __init__(self, queue: AsyncCallsQueue, folder: Path, state: dict[str, Any], grid: MegatronGrid) -> None:
        self._queue = queue
        self._folder = folder
        self._state = state
        self._grid = grid
        self._error: Exception | None = None
        self.done = False
        """Whether the checkpoint is complete and the latest."""
        PendingSave.under_way = self

    @property
    def step(self) -> int:
        """Return the step that is saved."""
        return int(self._state["step"])

    def poll(self) -> bool:
        """Complete the checkpoint if all ranks have written their bytes; return whether it is complete.

        Raises:
            OSError: The checkpoint cannot be written; on every rank, and again at every later call. The latest
                checkpoint stays the same, and the next save removes the partial folder.
        """
        return self._finish(blocking=False)

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raise the errors of `poll`."""
        self._finish(blocking=True)

    def _finish(self, blocking: bool) -> bool:
        if self._error is not None:
            raise self._error
        if self.done:
            return True
        try:
            with self._grid.as_world(), folders.released_after_error(self._folder):
                with _write_errors_on_every_rank(self._folder):
                    is_written = bool(self._queue.maybe_finalize_async_calls(blocking=blocking))
                if is_written:
                    _commit(self._folder, self._state)
                    self.done = True
        except Exception as error:
            self._error = error
            raise
        finally:
            if self.done or self._error is not None:
                PendingSave.under_way = None
        return self.done


def save_checkpoint(
    root: str | Path,
    step: int,
    optimizer: Optimizer,
    grid: MegatronGrid,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Save model, optimizer, schedule and random streams of a run; every rank of the grid calls it.

    Each rank writes its part; data-parallel replicas share the writing. The ranks write to a folder beside the target,
    then the folder gets checksums, is synced, and is renamed in one step; then `latest.json` names it.

    Args:
        root: The folder of checkpoints, on a file system that all ranks see.
        step: The number of the checkpoint.
        optimizer: The optimizer of the run; its chunks are the model.
        grid: The active grid, on ranks 0 to n - 1 of the default group.
        extra: JSON values of the caller, the same on every rank.
        asynchronous: Return once the tensors are copied, while another process writes; one save at a time.

    Returns:
        The pending save if `asynchronous`, else None.

    Raises:
        ValueError: A checkpoint of that step exists (delete its folder first), `extra` is not JSON, the grid lies on
            other ranks, or the model has low-rank adapters.
        RuntimeError: An asynchronous save is under way (wait for it first), or the entry script has no
            `if __name__ == "__main__":` guard.
        OSError: The folder cannot be made or written; on every rank. `PendingSave` raises it for asynchronous saves.
    """
    root = Path(root)
    grid.check_first_ranks("save_checkpoint")
    check_entry_script()
    if (pending := PendingSave.under_way) is not None:
        raise RuntimeError(f"the save of step {pending.step} is under way; call its wait() before saving step {step}")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra is not JSON: {error}") from error
    with grid.as_world():
        _agree(unsaved(optimizer))
        folder = _on_first_rank(lambda: folders.begin(root, step), f"make a folder for step {step} in {root}")
        prime(optimizer.inner)
        state = {
            "step": step,
            "dims": dataclasses.asdict(grid.dims) | {"virtual_stages": grid.virtual_stages},
            "distributed": optimizer.config.distributed,
            "schedule": optimizer.schedule_state(),
            "optimizer": optimizer_numbers(optimizer),
            "extra": dict(extra or {}),
        }
        with folders.released_after_error(folder):
            with _write_errors_on_every_rank(folder):
                request = save_tensors(
                    sharded_state(optimizer, grid, loading=False, same_grid=True),
                    folder,
                    replicas=grid.groups.dp_cp,
                    asynchronous=asynchronous,
                    content=METADATA,
                )
            if not asynchronous:
                _commit(folder, state)
                return None
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        return PendingSave(queue, folder, state, grid)


def load_checkpoint(
    root: str | Path, optimizer: Optimizer, grid: MegatronGrid, *, step: int | None = None, verify: bool = True
) -> Loaded:
    """Load the state of a run, saved on any grid, into a model and optimizer on this grid.

    Nothing in the folder can run code: every pickle in it is read with a list of allowed classes, or not at all.

    Args:
        root: The folder of checkpoints; or a training run that `ckpt convert RUN ROOT --to megatron` has made, with
            `--target megatron` for the local spec.
        optimizer: The optimizer over the model to load into, built with the same `OptimizerConfig.distributed`.
        grid: The active grid, on ranks 0 to n - 1 of the default group; tp, pp, virtual stages, dp and ep may differ
            from the saved grid.
        step: The number of the checkpoint; by default the latest.
        verify: Compare the checksum of every file first (the ranks share the reading); False compares sizes only.

    Raises:
        ValueError: There is no such checkpoint; a file is missing, truncated, corrupt, or holds pickled objects; a
            tensor is missing, unexpected or of another shape; the kind of optimizer differs, or the grid lies on other
            ranks. Every rank raises the same error.
    """
    root = Path(root)
    grid.check_first_ranks("load_checkpoint")
    with grid.as_world():
        _agree(unsaved(optimizer))
        step, folder = _on_first_rank(lambda: folders.find(root, step), f"look into {root}")
        _agree(folders.check_files(folder, dist.get_rank(), dist.get_world_size(), contents=verify))
        saved = folders.read_state(folder, step)
        if saved["distributed"] != optimizer.config.distributed:
            raise ValueError(
                f"{folder} was saved with OptimizerConfig.distributed={saved['distributed']}; build the optimizer so"
            )
        dims = dataclasses.asdict(grid.dims) | {"virtual_stages": grid.virtual_stages}
        index = _read_index(folder)
        prime(optimizer.inner)
        template = sharded_state(optimizer, grid, loading=True, same_grid=saved["dims"] == dims)
        _check_names(template, index, folder)
        with _loaded(folder):
            loaded = load_tensors(template, folder, index, replicas=grid.groups.dp_cp)
        for number, chunk in enumerate(optimizer.chunks):
            chunk.module.load_state_dict(loaded[f"model{number}"])
        load_optimizer(optimizer, grid, loaded, saved["optimizer"])
        if "random" in loaded:
            load_random_streams(loaded["random"])
    optimizer.load_schedule_state(saved["schedule"])
    return Loaded(step, saved["extra"], "random" in loaded)


def _on_first_rank(act: Callable[[], T], task: str) -> T:
    """Call `act` on the first rank only; return its result, or raise its error, on every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = act()
        except (OSError, ValueError) as error:
            answer[1] = error if isinstance(error, ValueError) else OSError(f"rank 0 cannot {task}: {error}")
    dist.broadcast_object_list(answer)
    result, problem = answer
    if problem is not None:
        raise problem
    return result


@contextlib.contextmanager
def _write_errors_on_every_rank(folder: Path) -> Iterator[None]:
    """Turn a failed write into an OSError on every rank; Megatron tells the reason to the first rank only."""
    try:
        yield
    except CheckpointException as failure:
        reasons = [_reasons_of(failure)]
        dist.broadcast_object_list(reasons)
        free = shutil.disk_usage(folder.parent).free // 2**20
        raise OSError(f"{folder} cannot be written ({free} MiB are free): {reasons[0]}") from failure


@contextlib.contextmanager
def _loaded(folder: Path) -> Iterator[None]:
    """Turn a failed load, which Megatron reports on every rank, into a ValueError."""
    try:
        yield
    except CheckpointException as failure:
        raise ValueError(f"{folder} cannot be loaded: {_reasons_of(failure)}") from failure
    except CheckpointingException as failure:
        raise ValueError(f"{folder} cannot be loaded: {failure}") from failure


def _reasons_of(failure: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failure.failures.items())


def _commit(folder: Path, state: dict[str, Any]) -> None:
    """Add `state.json` and the checksums (the ranks share the reading), and make the checkpoint the latest."""
    _on_first_rank(lambda: folders.write_json(folder / folders.STATE, state), f"write to {folder}")
    entries: dict[str, Any] = {}
    problem = None
    try:
        entries = folders.describe_files(folder, dist.get_rank(), dist.get_world_size())
    except OSError as error:
        problem = f"rank {dist.get_rank()} cannot read {folder}: {error}"
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (entries, problem))
    if problems := [problem for _, problem in gathered if problem is not None]:
        raise OSError("; ".join(problems))

    def complete() -> None:
        folders.write_json(
            folder / folders.MANIFEST, {name: entry for entries, _ in gathered for name, entry in entries.items()}
        )
        folders.commit(folder, state["step"])

    _on_first_rank(complete, f"complete {folder}")


def _read_index(folder: Path) -> Metadata:
    """Read the index on every rank; raise on all ranks if one of them cannot."""
    index, problems = Metadata({}), []
    try:
        index = read_index(folder)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    _agree(problems)
    return index


def _check_names(template: dict[str, Any], index: Metadata, folder: Path) -> None:
    """Raise if the checkpoint lacks tensors that a rank asks for, or holds tensors that no rank asks for."""
    asked = {sharded.key for sharded in nested_values(load_preprocess(template)[0]) if isinstance(sharded, ShardedBase)}
    everyone: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, asked)
    asked = set.union(*everyone)
    stored = set(index.state_dict_metadata)
    absent = sorted(asked - stored)
    unasked = sorted(key for key in stored - asked if not key.startswith("random."))
    if absent or unasked:
        raise ValueError(f"{folder} and the model differ: the checkpoint lacks {absent[:8]}, the model {unasked[:8]}")


def _agree(problems: list[str]) -> None:
    """Raise the problems that any rank found, each once, on every rank."""
    problems_of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(problems_of_ranks, problems)
    if everything := list(dict.fromkeys(problem for problems in problems_of_ranks for problem in problems)):
        raise ValueError("; ".join(everything[:8]))
