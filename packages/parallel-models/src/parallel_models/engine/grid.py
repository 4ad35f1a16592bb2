"""`Grid`: the ranks of a model and their process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_layers import ParallelDims
from parallel_layers.device import GPU, gpu
from parallel_models.engine.checks import require_kind


@dataclass(frozen=True)
class Grid:
    """The sizes, the device and the mesh of one model; several grids may share the ranks of a default group.

    Attributes:
        dims: The sizes.
        device: The device of this rank.
        mesh: The mesh, with the axes of `ParallelDims.build_mesh`; None for one rank.
        everyone: The group of all ranks of the grid; None for one rank.
        data_mesh: The ranks dp x cp, which hold the same parts of dense layers, as one axis; None for one rank.
        tensor_mesh: The ranks tp as one axis, of the mesh that `shard_mesh` is taken from; None for one rank.
        expert_mesh: The ranks of `mesh`, arranged by the experts that they hold; None where ep is 1. Its axes "pp",
            "dp", "cp", "tp" are the stage, the copies of a set of experts, the sets, and the shards of each expert.
        shard_mesh: The ranks of `data_mesh` as FSDP2 takes them; with several replicas two axes, (replicas, shards).
        expert_shard_mesh: The same for the copies of a set of experts; None where ep is 1.
    """

    dims: ParallelDims
    device: torch.device
    mesh: DeviceMesh | None = None
    everyone: ProcessGroup | None = None
    data_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    shard_mesh: DeviceMesh | None = None
    expert_shard_mesh: DeviceMesh | None = None

    @classmethod
    def build(
        cls, dims: ParallelDims, *, device: torch.device | str | None = None, mesh: DeviceMesh | None = None
    ) -> Self:
        """Form the groups of `dims` over all ranks of the default group, or take a mesh that is already built.

        Args:
            dims: The sizes. One rank needs no process group; each process then has its own model.
            device: The device (default: this process's current CUDA device if there is one, else the CPU).
            mesh: A mesh of `dims.build_mesh(...)`, for a grid on some of the ranks.

        Raises:
            ValueError: More than one rank has no process group, or the mesh has other sizes than `dims`.
        """
        require_kind("dims", dims, ParallelDims)
        if device is None:
            device = torch.device(GPU, gpu.current_device()) if gpu.is_available() else "cpu"
        device = torch.device(device)
        if mesh is not None:
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
            for name in ("pp", "dp", "cp", "tp"):
                if sizes.get(name) != getattr(dims, name):
                    raise ValueError(
                        f"the mesh has {sizes} and dims is {dims}; build the mesh with dims.build_mesh(...)"
                    )
        elif dims.world_size > 1:
            if not dist.is_initialized():
                raise ValueError(
                    f"{dims} needs {dims.world_size} ranks and there is no process group; start the ranks with "
                    "torchrun and call torch.distributed.init_process_group, or use parallel_layers.testing.run_ranks"
                )
            mesh = dims.build_mesh(device.type)
        if mesh is None:
            return cls(dims, device)
        data, tensor = _dense_meshes(dims, mesh)
        experts = _expert_mesh(dims, mesh)
        shards, copies = data, None if experts is None else experts["dp"]
        if dims.replicate > 1:
            replicas = _replicas_mesh(dims, mesh, data)
            shards, tensor = replicas["dp", "cp"], replicas["tp"]
            copies = None if copies is None else _replicas_mesh(dims, mesh, copies)["dp", "cp"]
        return cls(dims, device, mesh, _group_of_all(dims, mesh), data, tensor, experts, shards, copies)

    def group(self, axis: str) -> ProcessGroup | None:
        """Return the group of one axis; None if its size is 1."""
        others = {"ep": (self.expert_mesh, "cp"), "replicate": (self.shard_mesh, "dp")}
        mesh, name = others.get(axis, (self.mesh, axis))
        return None if mesh is None or getattr(self.dims, axis) == 1 else mesh.get_group(name)

    def rank(self, axis: str) -> int:
        """Return this rank's place on one axis."""
        mesh, name = (self.expert_mesh, "cp") if axis == "ep" else (self.mesh, axis)
        return 0 if mesh is None else mesh.get_local_rank(name)

    def require(self, axes: Sequence[str], backend: str) -> None:
        """Raise ValueError if an axis outside `axes` has a size above 1."""
        for name in ("dp", "pp", "cp", "tp", "ep", "replicate"):
            size = getattr(self.dims, name)
            if size > 1 and name not in axes:
                raise ValueError(f"backend={backend!r} does not offer {name}={size}; it offers {', '.join(axes)}")


def _dense_meshes(dims: ParallelDims, mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    if dims.cp == 1 or dims.dp == 1:
        return mesh["dp" if dims.cp == 1 else "cp"], mesh["tp"]
    regrouped = _regrouped(ParallelDims(pp=dims.pp, dp=dims.dp * dims.cp, tp=dims.tp), mesh)
    return regrouped["dp"], regrouped["tp"]


def _expert_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh | None:
    if dims.ep == 1:
        return None
    tp = dims.tp if dims.expert_tensor_parallel else 1
    copies = dims.replicate * dims.replica_size // (dims.ep * tp)
    return _regrouped(ParallelDims(pp=dims.pp, dp=copies, cp=dims.ep, tp=tp), mesh)


def _replicas_mesh(dims: ParallelDims, mesh: DeviceMesh, copies: DeviceMesh) -> DeviceMesh:
    """Arrange the ranks of `mesh` so that "dp" are the replicas, and "cp" the shards of `copies` in one replica."""
    shards = copies.size() // dims.replicate
    sizes = ParallelDims(pp=dims.pp, dp=dims.replicate, cp=shards, tp=dims.replica_size // shards)
    return _regrouped(sizes, mesh)


def _regrouped(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    """Build another grid on the ranks of `mesh`, in the same order."""
    return dims.build_mesh(mesh.device_type, sorted(mesh.mesh.flatten().tolist()))


def _group_of_all(dims: ParallelDims, mesh: DeviceMesh) -> ProcessGroup | None:
    larger = [name for name in ("pp", "dp", "cp", "tp") if getattr(dims, name) > 1]
    if not larger:
        return None
    if len(larger) == 1:
        return mesh.get_group(larger[0])
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    # A one-axis grid on the same ranks: `build_mesh` can form a group of some of the ranks.
    return _regrouped(ParallelDims(dp=dims.world_size), mesh).get_group("dp")
