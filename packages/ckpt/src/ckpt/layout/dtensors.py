"""Find the box of a DTensor that a rank holds; FSDP2 makes DTensors of a place's tensors."""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt.layout.pieces import Box, Shape, full_box


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

    For a DTensor the tensor is its local part: each axis of the mesh in turn cuts the rest as `torch.chunk` does. No
    data is communicated or copied.

    Raises:
        ValueError: The tensor has another shape or no memory, this rank is not in its mesh, or a placement is neither
            `Shard` nor `Replicate`; names the tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; pass a tensor of shape {shape}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the layout has {shape}")
    require_memory(name, tensor.device)
    box = list(full_box(shape))
    # Only a program that has DTensors imports this module: the import takes over a second.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return tensor.detach(), tuple(box)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name} lies on {tensor.device_mesh}, which does not have this rank")
    for rank, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        # Subclasses of Shard cut in other ways.
        if type(placement) is not module.Shard:
            raise ValueError(
                f"{name} is placed as {tensor.placements}, of which a rank holds no box; redistribute it to Shard and "
                "Replicate, or pass its full_tensor()"
            )
        start, stop = box[placement.dim]
        each = -(-(stop - start) // size)
        box[placement.dim] = (min(start + rank * each, stop), min(start + (rank + 1) * each, stop))
    return tensor.to_local().detach(), tuple(box)
