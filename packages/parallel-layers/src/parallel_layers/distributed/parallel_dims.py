"""The sizes of a parallel grid, and the device mesh that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# Outermost first: ranks of one tensor-parallel group are neighbours, so they share a node's fast links.
MESH_AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """How many ways each form of parallelism divides the work; 1 turns a form off.

    Args:
        dp: Data parallelism: copies of the model that see different batches.
        pp: Pipeline parallelism: stages of consecutive layers.
        cp: Context parallelism: parts of every sequence.
        tp: Tensor (and sequence) parallelism: shards of every layer.
        ep: Expert parallelism: groups of experts. It takes no ranks of its own, it regroups the `dp * cp * tp` ranks
            of a stage, and so must divide their number.

    Raises:
        ValueError: A size is not a positive integer, or `ep` does not divide `dp * cp * tp`.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive integer")
        stage = self.dp * self.cp * self.tp
        if stage % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp * cp * tp = {self.dp} * {self.cp} * {self.tp} = {stage}; "
                f"use ep in {{{', '.join(str(n) for n in divisors(stage))}}}"
            )

    @classmethod
    def parse(cls, text: str) -> ParallelDims:
        """The dims that a text like `"tp=2,pp=2"` states; an empty text is a grid of one rank.

        Raises:
            ValueError: An unknown or repeated name, or a value that is not a positive integer.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        sizes: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, size = (part.strip() for part in item.partition("="))
            if name not in names or name in sizes or not size.isdecimal():
                raise ValueError(
                    f"cannot read {item!r} in {text!r}; give each of {', '.join(names)} at most once, as in 'tp=2,pp=2'"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        """The number of ranks in the grid."""
        return self.dp * self.pp * self.cp * self.tp

    def build_mesh(self, device_type: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
        """Form the grid's process groups; returns a mesh with the axes `("pp", "dp", "cp", "tp")`, outermost first.

        Only the members call it, all of them, in the same order when they build several grids. So different grids
        (an actor on 4 ranks, a critic on 2 of them) can lie on any subsets of one default group.

        Args:
            device_type: `"cpu"` or `"cuda"`.
            ranks: The members' global ranks, increasing; default all ranks of the default group.

        Returns:
            A mesh; `mesh.get_group("tp")` is the group that the layers take. Its collectives have the default group's
            time limit.

        Raises:
            ValueError: The number of ranks is not `world_size`, they are not increasing or not ranks of the default
                group, this rank is not one of them, or members build other grids; the last on all of them.
        """
        members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        if ranks is None:  # each of which is here
            _meet(members, str(self))
        if len(members) != self.world_size:
            raise ValueError(f"{self} needs {self.world_size} ranks, but was given {len(members)}: {members}")
        if members != sorted(set(members)) or members[0] < 0 or members[-1] >= dist.get_world_size():
            raise ValueError(f"ranks={members} must increase and lie in 0..{dist.get_world_size() - 1}")
        me = dist.get_rank()
        if me not in members:
            raise ValueError(f"rank {me} is not a member of ranks={members}; only members build the mesh")
        if ranks is not None:
            _meet(members, str(self))
        grid = torch.tensor(members, dtype=torch.int).reshape(self.pp, self.dp, self.cp, self.tp)
        place = [int(i) for i in (grid == me).nonzero()[0]]
        groups: list[ProcessGroup] = []
        for axis in range(grid.dim()):
            line = grid[tuple(slice(None) if other == axis else i for other, i in enumerate(place))]
            group = dist.new_group(line.tolist(), timeout=default_timeout(), use_local_synchronization=True)
            assert isinstance(group, ProcessGroup)
            groups.append(group)
        return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=MESH_AXES)


def form_group(ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
    """One more process group of some ranks, which only its members call, all of them, in the same order.

    Args:
        ranks: The members' global ranks, increasing; this rank is one of them.
        backend: `"gloo"`, say, for collectives of CPU tensors beside NCCL's, with torch's time limit for that backend;
            default that of the default group, with its time limit.

    Raises:
        ValueError: Members form something else; on all of them.
    """
    _meet(list(ranks), f"a group with backend={backend!r}")
    timeout = default_timeout() if backend is None else None
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    return group


def default_timeout() -> timedelta | None:
    """How long collectives of the default group may take; None: its backend has no limit.

    `torch.distributed.new_group` does not hand it on: without a `timeout` a group has its backend's own.
    """
    group = dist.group.WORLD
    assert group is not None
    options = [group._get_backend(device).options for device in group._device_types]
    return max((each._timeout for each in options if each is not None), default=None)


def divisors(n: int) -> list[int]:
    """All positive divisors of `n`, increasing."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _meet(members: list[int], what: str) -> None:
    """Wait for all members; they are about to form `what`, all of them, for which torch must count alike on each.

    With `use_local_synchronization` torch names a group after its ranks and the number of groups that this process is
    in already. Once some members belong to another grid the numbers differ, the names do not match and `new_group`
    waits for ever. The members exchange their numbers through the default group's store; those that lag form groups of
    themselves alone, which concern nobody else.

    Raises:
        ValueError: Members form something else; names two of them. On all, which else would wait for each other.
    """
    store = dist.distributed_c10d._get_default_store()
    key = "parallel_layers/grid/" + ",".join(map(str, members))
    # No member can begin the next grid on these ranks before all have arrived at this one.
    turn = (store.add(f"{key}/arrivals", 1) - 1) // len(members)
    me = dist.get_rank()
    store.set(f"{key}/{turn}/{me}", f"{_group_count()} {what}")
    told = [store.get(f"{key}/{turn}/{rank}").decode().split(" ", 1) for rank in members]
    for rank, (_, other) in zip(members, told, strict=True):
        if other != told[0][1]:
            raise ValueError(
                f"rank {members[0]} forms {told[0][1]} and rank {rank} {other}; form the same grids in the same order "
                "on every rank"
            )
    while _group_count() < max(int(count) for count, _ in told):
        dist.new_group([me], use_local_synchronization=True)


def _group_count() -> int:
    return len(dist.distributed_c10d._world.pg_names)
