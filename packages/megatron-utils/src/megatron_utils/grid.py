"""`megatron_grid`: the process groups of a grid, as arguments for Megatron-Core and, for one block, as its globals.

The grid may lie on any increasing set of ranks of the default group; Megatron's own initialiser always takes all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_utils.core_state import Groups, global_state, is_active
from megatron_utils.core_version import INSTALLED
from parallel_layers import ParallelDims
from parallel_layers.device import GPU, gpu
from parallel_layers.distributed import form_group

# The axes that vary inside each group, outermost first; Megatron writes this order as "tp-cp-ep-dp-pp".
_DENSE_AXES = ("pp", "dp", "cp", "tp")
_EXPERT_AXES = ("pp", "expert_dp", "ep", "expert_tp")
# Groups by the names of `ProcessGroupCollection`; "tp_dp" and "single" (this rank alone) are no fields of it.
_DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "mp": ("pp", "tp"),
    "tp_dp": ("dp", "tp"),
    "tp_dp_cp": ("dp", "cp", "tp"),
    "tp_cp": ("cp", "tp"),
    "intra_dist_opt": ("pp", "dp", "cp", "tp"),
    "single": (),
}
_EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("expert_tp",),
    "tp_ep": ("ep", "expert_tp"),
    "tp_ep_pp": ("pp", "ep", "expert_tp"),
    "expt_dp": ("expert_dp",),
}
# Fields that hold the group of another field, and fields that this package has no groups for.
_SAME_GROUPS = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp"}
_NO_GROUPS = ("hcp", "inter_dist_opt")
# Groups that `ParallelDims.build_mesh` forms.
_MESH_GROUPS = ("pp", "dp", "cp", "tp")
# Groups whose traffic overlaps with other groups' traffic have a separate communicator. The other groups reduce a few
# numbers per step and share the communicator of a group with the same members, because forming all takes seconds.
_BUSY_GROUPS = {"dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp"}
# Process groups live as long as the default group: communicators are costly, and grids are entered again. They must not
# live longer: gloo's threads can abort the interpreter at its end if their groups are still there.
_FORMED: WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], Groups]] = WeakKeyDictionary()


@dataclass(frozen=True)
class MegatronGrid:
    """An active grid: its sizes and the process groups of this rank."""

    dims: ParallelDims
    virtual_stages: int | None
    """Number of model chunks per rank under the interleaved schedule; None without interleaving."""
    expert_tp: int
    """Number of tensor-parallel shards of each expert."""
    groups: ProcessGroupCollection
    """Megatron's own record: `groups.tp`, `groups.pp`, `groups.dp`, `groups.cp`, `groups.ep`, ..."""

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank holds the embedding; with virtual stages its first chunk does."""
        return bool(self.groups.pp.rank() == 0)

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank holds the head; with virtual stages its last chunk does."""
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    @property
    def tp(self) -> ProcessGroup | None:
        """Return the tensor-parallel group as parallel-layers takes it: None if nothing is sharded."""
        return self.groups.tp if self.dims.tp > 1 else None

    def check_first_ranks(self, operation: str) -> None:
        """Refuse an operation that needs the grid on the first ranks of the default group.

        Raises:
            ValueError: The grid lies on other ranks; names `operation`.
        """
        members = dist.get_process_group_ranks(self.groups.intra_dist_opt)
        if members[-1] != len(members) - 1:
            raise ValueError(
                f"{operation} works on the first ranks of the default group alone (Megatron-Core counts them from 0); "
                f"enter the grid on ranks 0 to {len(members) - 1}, not on {members}"
            )

    @contextlib.contextmanager
    def as_world(self) -> Iterator[None]:
        """Make the ranks of this grid the default group, for parts of Megatron-Core that use no other group.

        Ranks count from 0 inside the block; operations that cannot bear this call `check_first_ranks`.
        """
        world = self.groups.intra_dist_opt
        if world.size() == dist.get_world_size():
            yield
            return
        default = dist.group.WORLD
        dist.distributed_c10d._update_default_pg(world)
        try:
            yield
        finally:
            dist.distributed_c10d._update_default_pg(default)


def megatron_device() -> torch.device | None:
    """Return the device that Megatron-Core computes on, the current GPU, or None without a GPU.

    Megatron-Core takes this device for granted. Inside `megatron_utils.testing.cpu_stand_in` it is the CPU.
    """
    try:
        current: Any = gpu.current_device()
    except (AssertionError, RuntimeError):  # torch without CUDA, or a machine without a GPU
        return None
    return torch.device(GPU, current) if isinstance(current, int) else current


@contextlib.contextmanager
def megatron_grid(
    dims: ParallelDims,
    *,
    ranks: Sequence[int] | None = None,
    virtual_stages: int | None = None,
    expert_tp: int | None = None,
    seed: int | None = None,
) -> Iterator[MegatronGrid]:
    """Enter Megatron-Core's global state for a grid, and leave it at the end of the block.

    All ranks of the grid enter it together. The first entry forms the process groups; later entries use them again.
    Megatron-Core needs a GPU; on a CPU enter `megatron_utils.testing.cpu_stand_in` first.

    Args:
        dims: The grid. `dims.ep` regroups the `dp * cp * tp` ranks of a stage.
        ranks: The global ranks of the grid, increasing; default: all ranks of the default group. Checkpoints need ranks
            0 to n - 1.
        virtual_stages: The number of model chunks per rank, for the interleaved schedule; needs `dims.pp > 1`.
        expert_tp: The number of shards of each expert; default: `dims.tp` if the ranks suffice, else 1.
        seed: Seeds torch until the grid is left, and Megatron's random streams (the tensor-parallel and the expert
            stream differ by rank). None keeps torch's own state and starts the streams from 0.

    Yields:
        The active grid.

    Raises:
        ValueError: The sizes do not fit the ranks, or `virtual_stages` needs a pipeline.
        RuntimeError: Another grid is active (the state is global), or there is no default group.
    """
    if not isinstance(dims, ParallelDims):
        raise ValueError(f"dims={dims!r} must be sizes of a grid, such as ParallelDims(tp=2)")
    if dims.replicate > 1:
        raise ValueError(
            f"replicate={dims.replicate} is not offered: Megatron-Core shards over all of dp; leave it out"
        )
    if is_active():
        raise RuntimeError("a Megatron grid is already active in this process; leave it before entering another")
    if not dist.is_initialized():
        raise RuntimeError(
            "megatron_grid needs a default process group: call torch.distributed.init_process_group first"
        )
    if virtual_stages is not None and (virtual_stages < 2 or dims.pp == 1):
        raise ValueError(f"virtual_stages={virtual_stages} needs to be at least 2 with pp > 1, got pp={dims.pp}")
    expert_tp = _expert_tp(dims, expert_tp)
    members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    assert dist.group.WORLD is not None
    formed, key = _FORMED.setdefault(dist.group.WORLD, {}), (members, dims, expert_tp)
    if key not in formed:
        formed[key] = _form_groups(dims, members, expert_tp)
    groups = formed[key]
    with global_state(groups, virtual_stages=virtual_stages, seed=seed):
        yield MegatronGrid(dims, virtual_stages, expert_tp, _collection(groups))


def _collection(groups: Groups) -> ProcessGroupCollection:
    """Return the groups as Megatron-Core's own record."""
    fields = groups.keys() - {"tp_dp", "single"}
    others = {**_SAME_GROUPS, **INSTALLED.groups}
    return ProcessGroupCollection(
        **{field: groups[field] for field in fields},
        **{field: groups[source] for field, source in others.items()},
        **dict.fromkeys(_NO_GROUPS),
    )


def _expert_tp(dims: ParallelDims, expert_tp: int | None) -> int:
    stage = dims.dp * dims.cp * dims.tp
    if expert_tp is None:
        expert_tp = dims.tp if stage % (dims.ep * dims.tp) == 0 else 1
    if expert_tp < 1 or stage % (dims.ep * expert_tp):
        raise ValueError(
            f"ep={dims.ep} times expert_tp={expert_tp} does not divide the dp * cp * tp = {stage} ranks of a stage"
        )
    return expert_tp


def _form_groups(dims: ParallelDims, members: tuple[int, ...], expert_tp: int) -> Groups:
    """Return every group of this rank; None: this rank is outside (a middle stage has no embedding)."""
    mesh = dims.build_mesh(GPU if dist.get_backend() == "nccl" else "cpu", members)
    expert_dp = dims.dp * dims.cp * dims.tp // (dims.ep * expert_tp)
    dense = torch.tensor(members).view(dims.pp, dims.dp, dims.cp, dims.tp)
    expert = dense.view(dims.pp, expert_dp, dims.ep, expert_tp)
    me = dist.get_rank()
    lines = {name: _line(dense, _DENSE_AXES, axes, me) for name, axes in _DENSE_GROUPS.items()}
    lines |= {name: _line(expert, _EXPERT_AXES, axes, me) for name, axes in _EXPERT_GROUPS.items()}
    lines["embd"] = tuple(sorted({lines["pp"][0], lines["pp"][-1]}))
    lines["pos_embd"] = lines["pp"][:1]

    groups: dict[str, ProcessGroup | None] = {axis: mesh.get_group(axis) for axis in _MESH_GROUPS}
    # All ranks of a line have the same line under the same names, so that they decide alike.
    by_line = {lines[name]: group for name, group in groups.items()}
    for name in sorted(lines.keys() - groups.keys()):
        line = lines[name]
        group = by_line.get(line)
        if me in line and (group is None or (name in _BUSY_GROUPS and len(line) > 1)):
            group = form_group(line)
            by_line.setdefault(line, group)
        groups[name] = group if me in line else None
    return groups


def _line(grid: torch.Tensor, axes: tuple[str, ...], varying: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` along the `varying` axes only."""
    place = (grid == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if axis in varying else i for axis, i in zip(axes, place, strict=True))
    return tuple(int(member) for member in grid[index].flatten())
