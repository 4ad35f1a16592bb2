"""`Grid`: where a model's ranks stand, and the process groups that follow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_layers import ParallelDims


@dataclass(frozen=True)
class Grid:
    """The sizes, the device and the mesh of one model; several grids may lie on the ranks of one default group.

    Attributes:
        dims: the sizes.
        device: of this rank.
        mesh: with the axes of `ParallelDims.build_mesh`; None for one rank.
        everyone: a group of all ranks of the grid; None for one rank.
        data_mesh: the ranks that hold the same parts of dense layers, dp x cp, as one axis; None for one rank.
        expert_mesh: the same ranks as `mesh` by what they hold of the experts, None where ep is 1. Its axes "pp", "dp",
            "cp", "tp" are the stage, the copies of a set of experts, the sets, and the shards of each expert.
    """

    dims: ParallelDims
    device: torch.device
    mesh: DeviceMesh | None = None
    everyone: ProcessGroup | None = None
    data_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    @classmethod
    def build(
        cls, dims: ParallelDims, *, device: torch.device | str | None = None, mesh: DeviceMesh | None = None
    ) -> Self:
        """Form the groups of `dims` over all ranks of the default group, or take a mesh that is already built.

        Args:
            dims: the sizes. With one rank no process group is needed, and each process has a model of its own.
            device: default this process's current CUDA device where there is one, else the CPU.
            mesh: from `dims.build_mesh(...)`, for a grid on some of the ranks.

        Raises:
            ValueError: there is no process group for more than one rank, or the mesh has other sizes than `dims`.
        """
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if mesh is not None:
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
            for name in ("pp", "dp", "cp", "tp"):
                if sizes.get(name) != getattr(dims, name):
                    raise ValueError(f"the mesh has {sizes}, which is not {dims}; build it with dims.build_mesh(...)")
        elif dims.world_size > 1:
            if not dist.is_initialized():
                raise ValueError(
                    f"{dims} needs {dims.world_size} ranks and there is no process group; start the ranks with "
                    "torchrun and call torch.distributed.init_process_group, or use parallel_layers.testing.run_ranks"
                )
            mesh = dims.build_mesh(device.type)
        if mesh is None:
            return cls(dims, device)
        return cls(dims, device, mesh, _group_of_all(dims, mesh), _data_mesh(dims, mesh), _expert_mesh(dims, mesh))

    def group(self, axis: str) -> ProcessGroup | None:
        """The group of one axis; None where its size is 1."""
        if self.mesh is None or getattr(self.dims, axis) == 1:
            return None
        if axis == "ep":
            assert self.expert_mesh is not None
            return self.expert_mesh.get_group("cp")
        return self.mesh.get_group(axis)

    def rank(self, axis: str) -> int:
        """This rank's place on one axis."""
        if axis == "ep":
            return 0 if self.expert_mesh is None else self.expert_mesh.get_local_rank("cp")
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    @property
    def expert_tensor_parallel(self) -> bool:
        """Whether each expert is divided over tp: experts are then shared out over dp x cp, where ep divides that.
        Otherwise experts are whole, and shared out over neighbouring ranks, those of a tp group first."""
        return self.dims.dp * self.dims.cp % self.dims.ep == 0

    def require(self, axes: Sequence[str], backend: str) -> None:
        """Raise ValueError if a form of parallelism other than `axes` is asked for."""
        for name in ("dp", "pp", "cp", "tp", "ep"):
            size = getattr(self.dims, name)
            if size > 1 and name not in axes:
                raise ValueError(f"backend={backend!r} does not offer {name}={size}; it offers {', '.join(axes)}")


def _data_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    if dims.cp == 1 or dims.dp == 1:
        return mesh["dp" if dims.cp == 1 else "cp"]
    return _regrouped(ParallelDims(pp=dims.pp, dp=dims.dp * dims.cp, tp=dims.tp), mesh)["dp"]


def _expert_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh | None:
    if dims.ep == 1:
        return None
    data = dims.dp * dims.cp
    if data % dims.ep == 0:
        return _regrouped(ParallelDims(pp=dims.pp, dp=data // dims.ep, cp=dims.ep, tp=dims.tp), mesh)
    return _regrouped(ParallelDims(pp=dims.pp, dp=data * dims.tp // dims.ep, cp=dims.ep), mesh)


def _regrouped(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    """Another grid on the ranks of `mesh`, in the same order."""
    return dims.build_mesh(mesh.device_type, sorted(mesh.mesh.flatten().tolist()))


def _group_of_all(dims: ParallelDims, mesh: DeviceMesh) -> ProcessGroup | None:
    larger = [name for name in ("pp", "dp", "cp", "tp") if getattr(dims, name) > 1]
    if not larger:
        return None
    if len(larger) == 1:
        return mesh.get_group(larger[0])
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    # A grid with one axis on the same ranks: `build_mesh` knows how some of the ranks form a group by themselves.
    return _regrouped(ParallelDims(dp=dims.world_size), mesh).get_group("dp")


def checkpoint_folder(path: str | os.PathLike[str]) -> str:
    """The path of a local checkpoint folder.

    Raises:
        ValueError: there is none; names of models on a hub are not downloaded here.
    """
    folder = os.fspath(path)
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(
            f"{folder!r} is no checkpoint folder (it has no config.json); download the model first and pass its folder"
        )
    return folder
