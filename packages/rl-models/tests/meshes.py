"""The mesh of each grid on the first ranks, formed once by each rank: a pool replaces ranks that have many groups."""

from __future__ import annotations

from functools import cache

from torch.distributed import DeviceMesh

from parallel_layers import ParallelDims


@cache
def mesh_of(dims: ParallelDims, device: str = "cpu") -> DeviceMesh | None:
    """Return the mesh of a grid on ranks 0, 1, ...; None for one rank. Every rank of the grid calls this function."""
    return dims.build_mesh(device, list(range(dims.world_size))) if dims.world_size > 1 else None
