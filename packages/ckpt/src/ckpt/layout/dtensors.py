"""Find the box of a DTensor that a rank holds; FSDP2 makes DTensors of a place's tensors."""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt.layout.pieces import Box, Shape, full_box

Range = tuple[int, int]


def require_memory(what: str, device: torch.device) -> None:
    """Refuse the meta device, whose tensors have no memory."""
    if device.type == "meta":
        raise ValueError(
            f"{what} is on the meta device, which holds no numbers; allocate memory first, as by to_empty()"
        )


def require_mapping(name: str, value: object) -> None:
    """Refuse a module or a list where tensors by local name are expected."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} is a {type(value).__name__}; pass a mapping of local names, such as a module's state_dict()"
        )


def on_this_rank(name: str, tensor: Tensor, shape: Shape) -> tuple[Tensor, Box]:
    """Return a place's tensor of `shape`, detached, and the box of it that this rank holds.

    For a DTensor the tensor is its local part: each axis of the mesh in turn cuts the rest as `torch.chunk` does. Where
    FSDP2 cuts the rows of a tensor-parallel shard, torch lists the axis of FSDP2 first, with a `split_factor`: that
    axis cuts each of so many groups of rows. No data is communicated or copied.

    Raises:
        ValueError: The tensor has another shape or no memory, this rank is not in its mesh, or its placements leave no
            box on a rank; names the tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; pass a tensor of shape {shape}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the layout has {shape}")
    require_memory(name, tensor.device)
    # Only a program that has DTensors imports this module: the import takes over a second.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return tensor.detach(), full_box(shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name} lies on {tensor.device_mesh}, which does not have this rank")
    ranges = [[side] for side in full_box(shape)]
    for rank, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        groups = 1 if type(placement) is module.Shard else getattr(placement, "split_factor", 0)
        if not groups:
            ranges = [[]]
            break
        ranges[placement.dim] = _chunk(ranges[placement.dim], rank, size, groups)
    if any(len(sides) != 1 for sides in ranges):
        raise ValueError(
            f"{name} is placed as {tensor.placements}, of which a rank holds no box; redistribute it to Shard and "
            "Replicate, or pass its full_tensor()"
        )
    return tensor.to_local().detach(), tuple(side for sides in ranges for side in sides)


def _chunk(ranges: list[Range], rank: int, size: int, groups: int) -> list[Range]:
    """Cut ranges, one after another, into groups, and return chunk `rank` of `size` of each group, joined."""
    length, taken = sum(stop - start for start, stop in ranges), list[Range]()
    each = max(-(-length // groups), 1)
    for first in range(0, length, each):
        last = min(first + each, length)
        chunk = -(-(last - first) // size)
        begin, end = min(first + rank * chunk, last), min(first + (rank + 1) * chunk, last)
        for start, stop in ranges:
            low, high = start + max(begin, 0), min(start + end, stop)
            if low < high and taken and taken[-1][1] == low:
                taken[-1] = (taken[-1][0], high)
            elif low < high:
                taken.append((low, high))
            begin, end = begin - (stop - start), end - (stop - start)
    return taken or [(0, 0)]
