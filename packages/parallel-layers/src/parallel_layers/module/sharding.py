"""The division of a parameter over a group, stored in its module.

The module stores it under the parameter's name, because FSDP2, `to_empty` and deep copies replace the parameter object.
A parameter without an entry is whole on every rank.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed.checkpoint_guard import guard_state_dict, unguard_state_dict
from parallel_layers.distributed.parallel_dims import divisors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Block:
    """The units `start` to `stop - 1` of a dim of the full tensor; `counted` on exactly one rank that holds them."""

    start: int
    stop: int
    counted: bool = True


@dataclass(frozen=True)
class Sharding:
    """This rank's part of a parameter that is divided along one dim.

    Args:
        group: The ranks that divide the parameter; None: it is whole, with blocks that are not `counted`.
        dim: The divided dim.
        full_size: The size of this dim in the full tensor.
        blocks: The blocks of this rank, in local order. Local units after the blocks are padding.
    """

    group: ProcessGroup | None
    dim: int
    full_size: int
    blocks: tuple[Block, ...]

    def local_ranges(self) -> Iterator[tuple[int, Block]]:
        """Yield each block with the local index of its first unit."""
        offset = 0
        for block in self.blocks:
            yield offset, block
            offset += block.stop - block.start


def shard_evenly(sizes: Sequence[int], group: ProcessGroup | None, dim: int, name: str) -> Sharding | None:
    """Divide consecutive parts of a dim, each evenly over the group, as `divide` does; without a group return None."""
    if group is None:
        return None
    rank, start, blocks = group.rank(), 0, []
    for size in sizes:
        local = divide(size, group.size(), name)
        blocks.append(Block(start + rank * local, start + (rank + 1) * local))
        start += size
    return Sharding(group, dim, start, tuple(blocks))


def shard_heads(parts: Sequence[tuple[int, int]], group: ProcessGroup | None, dim: int) -> Sharding | None:
    """Divide consecutive parts `(heads, head size)` of a dim, each by its heads; without a group return None.

    With more ranks than heads of a part each head lies on consecutive ranks: rank r has head r · heads // tp.
    """
    if group is None:
        return None
    rank, tp, start, blocks = group.rank(), group.size(), 0, []
    for heads, size in parts:
        first, local = rank * heads // tp, max(heads // tp, 1)
        counted = rank % max(tp // heads, 1) == 0
        blocks.append(Block(start + first * size, start + (first + local) * size, counted))
        start += heads * size
    return Sharding(group, dim, start, tuple(blocks))


def shared_range(parts: Sequence[tuple[int, int]], tp: int) -> tuple[int, int, int] | None:
    """Return `(first, stop, replicas)`: the local units that `replicas` consecutive ranks hold; None: no such units.

    Parts `(heads, head size)` with fewer heads than ranks must stand one behind another and have equally many.
    """
    ends = [0, *itertools.accumulate(max(heads // tp, 1) * size for heads, size in parts)]
    shared = [number for number, (heads, _) in enumerate(parts) if heads < tp]
    return (ends[shared[0]], ends[shared[-1] + 1], tp // parts[shared[0]][0]) if shared else None


def divide_heads(count: int, heads: int, tp: int, name: str) -> int:
    """Return how many of `count` heads, which `heads` other heads share, a rank has: at least one.

    Raises:
        ValueError: The count neither divides tp nor is divisible by it; names the usable values of tp.
    """
    if count % tp and tp % count:
        usable = ", ".join(str(n) for n in divisors(heads) if not (count % n and n % count))
        raise ValueError(f"{name}={count} neither divides tp={tp} nor is divisible by it; use tp in {{{usable}}}")
    return max(count // tp, 1)


def divide(size: int, tp: int, name: str) -> int:
    """Return `size / tp`; raise ValueError with the usable values of tp if tp does not divide the size."""
    if size % tp:
        usable = ", ".join(str(n) for n in divisors(size))
        raise ValueError(f"{name}={size} is not divisible by tp={tp}; use tp in {{{usable}}}")
    return size // tp


def set_sharding(module: nn.Module, name: str, *shardings: Sharding | None) -> None:
    """Record the division of `module`'s own parameter `name`: one `Sharding` per divided dim (None: not divided)."""
    divided = tuple(sharding for sharding in shardings if sharding is not None)
    if not divided:
        return
    if "_shardings" not in module.__dict__:
        module.register_state_dict_post_hook(guard_state_dict)
        module.register_load_state_dict_pre_hook(unguard_state_dict)
    module.__dict__.setdefault("_shardings", {})[name] = divided


def get_sharding(module: nn.Module, name: str) -> tuple[Sharding, ...]:
    """Return the division of `module`'s own parameter `name`; empty for a whole parameter."""
    return module.__dict__.get("_shardings", {}).get(name, ())


def blocks_of(module: nn.Module, name: str) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the rectangles of `module`'s own parameter or buffer `name`, in the local and in the full tensor."""
    shardings = {sharding.dim: sharding for sharding in get_sharding(module, name)}
    per_dim = [
        [
            (slice(offset, offset + block.stop - block.start), slice(block.start, block.stop))
            for offset, block in shardings[dim].local_ranges()
        ]
        if dim in shardings
        else [(slice(0, size), slice(0, size))]
        for dim, size in enumerate(getattr(module, name).shape)
    ]
    for rectangle in itertools.product(*per_dim):
        yield tuple(local for local, _ in rectangle), tuple(full for _, full in rectangle)


def full_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Return the shape of the full tensor of `module`'s own parameter or buffer `name`."""
    shape = list(getattr(module, name).shape)
    for sharding in get_sharding(module, name):
        shape[sharding.dim] = sharding.full_size
    return tuple(shape)


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Return True if `x` is a DTensor. DTensor is not imported here, because the import takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def first_row(x: Tensor) -> int:
    """Return the index of the first row that FSDP2 has left on this rank."""
    if not is_dtensor(x):
        return 0
    begin, rows = 0, x.shape[0]
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            if not placement.is_shard(0):
                raise ValueError(f"FSDP2 must shard along dim 0, got {placement}")
            chunk = -(-rows // x.device_mesh.size(axis))
            start = min(x.device_mesh.get_local_rank(axis) * chunk, rows)
            begin, rows = begin + start, min(chunk, rows - start)
    return begin


@torch.no_grad()
def load_full_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's parts of full tensors, by name, into a model's parameters and buffers; padding becomes 0.

    `tensors` can be the `state_dict()` of the undivided model.

    Raises:
        ValueError: A name is unknown, or a shape differs from the full shape. All checks precede the first copy.
    """
    owners = {
        f"{path}.{name}" if path else name: (owner, name)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name in (*owner._parameters, *owner._buffers)
        if getattr(owner, name) is not None
    }
    if unknown := sorted(tensors.keys() - owners.keys()):
        raise ValueError(f"{type(module).__name__} has no {', '.join(unknown)}; it has {', '.join(owners)}")
    for path, full in tensors.items():
        if tuple(full.shape) != (expected := full_shape(*owners[path])):
            raise ValueError(f"{path} has shape {tuple(full.shape)}, the full tensor {expected}")
    for path, full in tensors.items():
        owner, name = owners[path]
        local = getattr(owner, name)
        local.zero_()
        for local_slices, full_slices in blocks_of(owner, name):
            local[local_slices] = full[full_slices]
