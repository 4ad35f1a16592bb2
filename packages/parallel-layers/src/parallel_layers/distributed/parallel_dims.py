"""`ParallelDims`, the sizes of a parallel grid, and the device mesh that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_layers.distributed.gloo import prepare_gloo
from parallel_layers.distributed.group_rendezvous import agreed_name, meet

# Outermost first: ranks of one tensor-parallel group are neighbours, so they share a node's fast links.
MESH_AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """The number of parts into which each form of parallelism divides the work; 1 turns a form off.

    Args:
        dp: Data parallelism: copies of the model that see different batches, the ranks of all replicas together.
        pp: Pipeline parallelism: stages of consecutive layers.
        cp: Context parallelism: parts of every sequence.
        tp: Tensor (and sequence) parallelism: shards of every layer.
        ep: Expert parallelism: groups of experts. It regroups the `dp / replicate * cp * tp` ranks that a stage has in
            a replica instead of taking more ranks, so `ep` must divide their number.
        replicate: Hybrid sharding (HSDP): replicas of `dp / replicate` data-parallel ranks each. Parameters, gradients
            and optimizer states are sharded within a replica, best a node, and gradients summed over the replicas.

    Raises:
        ValueError: A size is not a positive integer, `replicate` does not divide `dp`, or `ep` does not divide
            `dp / replicate * cp * tp`.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    replicate: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive integer")
        product = f"dp / replicate * cp * tp = {self.dp} / {self.replicate} * {self.cp} * {self.tp}"
        for name, whole, text in (("replicate", self.dp, "dp"), ("ep", self.replica_size, product)):
            if whole % getattr(self, name):
                usable = ", ".join(str(n) for n in divisors(whole))
                raise ValueError(
                    f"{name}={getattr(self, name)} does not divide {text} = {whole}; use {name} in {{{usable}}}"
                )

    @classmethod
    def parse(cls, text: str) -> ParallelDims:
        """Return the dims of a text like `"tp=2,pp=2"`; an empty text is a grid of one rank.

        Raises:
            ValueError: An unknown or repeated name, or a value that is not a positive integer.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        sizes: dict[str, int] = {}
        for item in filter(None, (text_part.strip() for text_part in text.split(","))):
            name, _, size = (text_part.strip() for text_part in item.partition("="))
            if name not in names or name in sizes or not size.isdecimal():
                raise ValueError(
                    f"cannot read {item!r} in {text!r}; give each of {', '.join(names)} at most once, as in 'tp=2,pp=2'"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the grid."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def replica_size(self) -> int:
        """Return the number of ranks of a replica in one pipeline stage; they are neighbours."""
        return self.dp // self.replicate * self.cp * self.tp

    @property
    def expert_tensor_parallel(self) -> bool:
        """Return whether each expert is divided over tp; the experts are then distributed over dp x cp of a replica.

        Otherwise experts are whole and distributed over neighbouring ranks, the ranks of a tp group first.
        """
        return self.replica_size // self.tp % self.ep == 0

    def build_mesh(self, device_type: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
        """Form the process groups of the grid; return a mesh with the axes `("pp", "dp", "cp", "tp")`, outermost first.

        Every member calls this method, and only members do, in the same order if they build several grids. Different
        grids (an actor on 4 ranks, a critic on 2 of them) can lie on any subsets of one default group.
        `mesh.get_group("tp")` is the group that the layers take; it has the default group's time limit. Replicas are
        runs of the "dp" axis; the groups inside and across them are formed by `parallel_models.Grid`.

        Args:
            device_type: `"cpu"` or `"cuda"`.
            ranks: The global ranks of the members, increasing; default: all ranks of the default group.

        Raises:
            ValueError: The ranks do not fit the grid, or this rank is not a member; or members build different grids or
                give different `ranks`, which all of them raise.
            TimeoutError: A member did not come within the time limit of the default group's store.
        """
        members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        if ranks is None:
            # Meet before the checks, so that all ranks raise if sizes differ.
            meet(members, str(self))
        if len(members) != self.world_size:
            raise ValueError(
                f"{self} needs {self.world_size} ranks, but was given {len(members)}: {members}; start "
                f"{self.world_size} (torchrun --nproc-per-node), or choose sizes whose product is {len(members)}"
            )
        if members != sorted(set(members)) or members[0] < 0 or members[-1] >= dist.get_world_size():
            raise ValueError(f"ranks={members} must increase and lie in 0..{dist.get_world_size() - 1}")
        me = dist.get_rank()
        if me not in members:
            raise ValueError(f"rank {me} is not a member of ranks={members}; only members build the mesh")
        if ranks is not None:
            meet(members, str(self))
        grid = torch.tensor(members, dtype=torch.int).reshape(self.pp, self.dp, self.cp, self.tp)
        place = [int(i) for i in (grid == me).nonzero()[0]]
        if device_type == "cpu":
            prepare_gloo()
        groups = []
        for axis in range(grid.dim()):
            line = grid[tuple(slice(None) if dim == axis else i for dim, i in enumerate(place))]
            groups.append(_new_group(line.tolist()))
        return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=MESH_AXES)


def form_group(ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
    """Form one more process group; every member calls this function, in the same order if there are several groups.

    Args:
        ranks: The global ranks of the members, increasing; this rank is a member.
        backend: The backend, such as `"gloo"` for collectives of CPU tensors beside NCCL, with torch's time limit for
            that backend; default: backend and time limit of the default group.

    Raises:
        ValueError, TimeoutError: As `ParallelDims.build_mesh`.
    """
    meet(list(ranks), f"a group with backend={backend!r}")
    prepare_gloo()
    return _new_group(list(ranks), backend)


def _new_group(ranks: list[int], backend: str | None = None) -> ProcessGroup:
    # `new_group` would take the backend's default.
    timeout = time_limit(dist.group.WORLD) if backend is None else None
    with agreed_name(ranks):
        group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    return group


def time_limit(group: ProcessGroup | None) -> timedelta | None:
    """Return the time limit of a group's collectives; None for no limit."""
    assert group is not None
    options = [group._get_backend(device).options for device in group._device_types]
    return max((backend_options._timeout for backend_options in options if backend_options is not None), default=None)


def divisors(n: int) -> list[int]:
    """Return all positive divisors of `n`, increasing."""
    return [d for d in range(1, n + 1) if n % d == 0]
