"""`save_checkpoint` and `load_checkpoint`: training state that moves between grids and survives a kill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_sharded_metadata,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from megatron_utils.dist_checkpointing import folder as folders
from megatron_utils.dist_checkpointing.state import (
    METADATA,
    load_optimizer,
    load_random_streams,
    optimizer_numbers,
    prime,
    sharded_state,
)
from megatron_utils.grid import MegatronGrid
from megatron_utils.optimizer import Optimizer


class Loaded(NamedTuple):
    """What `load_checkpoint` found beside the tensors."""

    step: int
    extra: dict[str, Any]
    """What the caller gave to `save_checkpoint`."""
    random_restored: bool
    """Whether random streams were restored: they are a rank's own, so only on the grid that saved them."""


class PendingSave:
    """An asynchronous save under way. Every rank calls `poll` or `wait`, in the same order."""

    def __init__(self, queue: AsyncCallsQueue, folder: Path, state: dict[str, Any], grid: MegatronGrid) -> None:
        self._queue = queue
        self._folder = folder
        self._state = state
        self._grid = grid
        self.done = False
        """Whether the checkpoint is complete and the latest."""

    def poll(self) -> bool:
        """Complete the checkpoint if its bytes are written on all ranks; returns whether it is complete."""
        return self._finish(blocking=False)

    def wait(self) -> None:
        """Wait until the checkpoint is complete."""
        self._finish(blocking=True)

    def _finish(self, blocking: bool) -> bool:
        if not self.done:
            with self._grid.as_world():
                if self._queue.maybe_finalize_async_calls(blocking=blocking):
                    _commit(self._folder, self._state)
                    self._queue.close()
                    self.done = True
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

    Each rank writes its part, replicas share the writing (fully parallel over data parallelism). All is written to a
    folder beside the target, checksummed, synced and renamed in one step, and only then does `latest.json` name it.

    Args:
        root: the folder of checkpoints, on a file system that all ranks see.
        step: the number under which it is found again.
        optimizer: of the run; its chunks are the model.
        grid: the active grid.
        extra: JSON values of the caller's, the same on every rank.
        asynchronous: return once the tensors are copied; a process of its own writes. One at a time. The entry
            script then needs an `if __name__ == "__main__":` guard.

    Raises:
        ValueError: a checkpoint of that step exists.
        OSError: the first rank cannot make the folder; on every rank.
    """
    root = Path(root)
    if folders.step_folder(root, step).exists() and step <= (folders.latest_step(root) or -1):
        raise ValueError(f"{folders.step_folder(root, step)} exists; a complete checkpoint is never written over")
    with grid.as_world():
        folder = _begin(root, step)
        prime(optimizer.inner)
        state = {
            "step": step,
            "dims": dataclasses.asdict(grid.dims) | {"virtual_stages": grid.virtual_stages},
            "distributed": optimizer.config.distributed,
            "schedule": optimizer.schedule_state(),
            "optimizer": optimizer_numbers(optimizer),
            "extra": dict(extra or {}),
        }
        strategy = get_default_save_sharded_strategy()
        if grid.groups.dp_cp.size() > 1:
            strategy = FullyParallelSaveStrategyWrapper(strategy, grid.groups.dp_cp)
        request = dist_checkpointing.save(
            sharded_state(optimizer, grid, loading=False, same_grid=True),
            str(folder),
            strategy,
            async_sharded_save=asynchronous,
            content_metadata=METADATA,
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
    """Load a run's state into a model and optimizer on this grid, whatever grid saved it.

    Args:
        root: the folder of checkpoints.
        optimizer: over the model to load into; built with the same `OptimizerConfig.distributed`.
        grid: the active grid; tp, pp, virtual stages, dp and ep may differ from the saved ones.
        step: which checkpoint; default the latest.
        verify: compare every file's checksum first (the ranks share the reading); otherwise sizes alone.

    Raises:
        ValueError: on every rank alike: no such checkpoint, a missing, truncated or corrupt file, a tensor that is
            missing or unexpected: named; or another kind of optimizer.
    """
    root = Path(root)
    with grid.as_world():
        step = folders.latest_step(root) if step is None else step
        if step is None:
            raise ValueError(f"{root} holds no complete checkpoint ({folders.LATEST} is missing)")
        folder = folders.step_folder(root, step)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; there is no complete checkpoint of step {step}")
        _agree(folders.check_files(folder, dist.get_rank(), dist.get_world_size(), contents=verify))
        saved = json.loads((folder / folders.STATE).read_text())
        if saved["distributed"] != optimizer.config.distributed:
            raise ValueError(
                f"{folder} was saved with OptimizerConfig.distributed={saved['distributed']}; build the optimizer so"
            )
        dims = dataclasses.asdict(grid.dims) | {"virtual_stages": grid.virtual_stages}
        strategy = get_default_load_sharded_strategy(str(folder))
        if grid.groups.dp_cp.size() > 1:
            strategy = FullyParallelLoadStrategyWrapper(strategy, grid.groups.dp_cp)
        prime(optimizer.inner)
        template = sharded_state(optimizer, grid, loading=True, same_grid=saved["dims"] == dims)
        _check_names(template, folder)
        loaded = dist_checkpointing.load(template, str(folder), strategy)
        for number, chunk in enumerate(optimizer.chunks):
            chunk.module.load_state_dict(loaded[f"model{number}"])
        load_optimizer(optimizer, grid, loaded, saved["optimizer"])
        if "random" in loaded:
            load_random_streams(loaded["random"])
    optimizer.load_schedule_state(saved["schedule"])
    return Loaded(step, saved["extra"], "random" in loaded)


def _begin(root: Path, step: int) -> Path:
    """`folders.begin` on the first rank; its folder, or its error, on every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = str(folders.begin(root, step))
        except OSError as error:
            answer[1] = f"rank 0 cannot make a folder for step {step} in {root}: {error}"
    dist.broadcast_object_list(answer)
    name, problem = answer
    if problem is not None:
        raise OSError(problem)
    return Path(name)


def _commit(folder: Path, state: dict[str, Any]) -> None:
    """Add `state.json`, checksum the files, all ranks sharing the reading, and make the checkpoint the latest."""
    if dist.get_rank() == 0:
        folders.write_json(folder / folders.STATE, state)
    dist.barrier()
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, folders.describe_files(folder, dist.get_rank(), dist.get_world_size()))
    if dist.get_rank() == 0:
        folders.write_json(folder / folders.MANIFEST, {name: entry for part in parts for name, entry in part.items()})
        folders.commit(folder, state["step"])
    dist.barrier()


def _check_names(template: dict[str, Any], folder: Path) -> None:
    """Raise for tensors that the checkpoint lacks, and for tensors of it that no rank asks for."""
    wanted = {
        sharded.key for sharded in nested_values(load_preprocess(template)[0]) if isinstance(sharded, ShardedBase)
    }
    everyone: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, wanted)
    wanted = set.union(*everyone)
    held = {sharded.key for sharded in load_sharded_metadata(str(folder)).values()}
    absent = sorted(wanted - held)
    unasked = sorted(key for key in held - wanted if not key.startswith("random."))
    if absent or unasked:
        raise ValueError(f"{folder} and the model differ: the checkpoint lacks {absent[:8]}, the model {unasked[:8]}")


def _agree(problems: list[str]) -> None:
    """Raise on every rank what any rank found."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, problems)
    if everything := [problem for problems in found for problem in problems]:
        raise ValueError("; ".join(everything[:8]))
