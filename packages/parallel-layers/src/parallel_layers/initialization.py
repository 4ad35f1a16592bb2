"""Parameters drawn as functions of (seed, name) over the full tensor's coordinates.

A rank draws exactly its part of the full tensor, so gathered parameters are bitwise equal whatever the parallel grid.
The last two dims of the full tensor are cut into fixed tiles; a tile is drawn by a CPU generator that is seeded with a
hash of (seed, name, tile), always as a whole. A rank draws the tiles that its part touches, a few kilobytes more than
it needs. CUDA parameters are drawn on the CPU too: the numbers do not depend on the device.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn

from parallel_layers.sharding import blocks_of, full_shape, is_dtensor


class _Drawn(TypedDict):
    dtype: torch.dtype
    device: str


# Large enough that Python's part in drawing a tile does not matter, small enough that a shard wastes little.
_TILE = (128, 1024)
_DRAWN: _Drawn = {"dtype": torch.float32, "device": "cpu"}

Fill = Callable[[Tensor, torch.Generator], object]
Range = tuple[int, int]


def initialize_(module: nn.Module, seed: int, *, std: float = 0.02, prefix: str = "") -> None:
    """Fill a model in place: matrices from N(0, std^2), biases with 0; the rest (norms, sinks) as their modules begin.

    A parameter's numbers depend on `seed`, on `prefix` + its name and on its full shape alone. Give each pipeline stage
    the `prefix` that makes its names the whole model's. Parameters on the meta device are left; after `to_empty` they
    become what they would have been.

    Raises:
        ValueError: A parameter is already sharded by FSDP2; initialise before `fully_shard`.
    """
    seen: set[int] = set()
    for path, owner in module.named_modules():
        _reset_the_rest(owner)
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            canonical = prefix + (f"{path}.{name}" if path else name)
            if name.endswith("bias"):  # experts' are matrices, too
                fill_parameter_(owner, name, seed, zeros, canonical=canonical)
            elif parameter.dim() >= 2:
                fill_parameter_(owner, name, seed, normal(std), canonical=canonical)


def _reset_the_rest(owner: nn.Module) -> None:
    """Let a module set anew what is neither a matrix nor a bias: its vectors and buffers, which `to_empty` spoils."""
    vectors = (p for name, p in owner.named_parameters(recurse=False) if p.dim() < 2 and not name.endswith("bias"))
    reset = getattr(owner, "reset_parameters", None)
    if reset is not None and any(True for _ in itertools.chain(vectors, owner.buffers(recurse=False))):
        with torch.random.fork_rng(devices=[]):  # what it draws besides is drawn again
            reset()


def fill_parameter_(module: nn.Module, name: str, seed: int, fill: Fill, *, canonical: str | None = None) -> None:
    """Fill `module`'s own parameter `name` with this rank's part of the full tensor; padding becomes 0.

    Args:
        module: The module that owns the parameter.
        name: The parameter's name in it.
        seed: The seed.
        fill: `normal(std)`, `uniform(bound)`, `zeros`, or anything that fills a tensor from a generator.
        canonical: The name that goes into the hash; default `name`.

    Raises:
        ValueError: The parameter is already sharded by FSDP2.
    """
    parameter = module.get_parameter(name)
    if is_dtensor(parameter):
        raise ValueError(f"parameter {canonical or name} is a DTensor already; initialise the model before fully_shard")
    if parameter.is_meta:
        return
    with torch.no_grad():
        parameter.zero_()
        for local, full in blocks_of(module, name):
            ranges = [(part.start, part.stop) for part in full]
            parameter[local] = draw(full_shape(module, name), ranges, seed, canonical or name, fill).to(parameter)


def draw(shape: Sequence[int], ranges: Sequence[Range], seed: int, name: str, fill: Fill) -> Tensor:
    """The rectangle `ranges` (a start and a stop for each dim) of the full tensor `name`, as fp32 on the CPU.

    The tensor is a function of (seed, name, shape) alone; any two rectangles agree where they overlap.
    """
    if len(shape) < 2:
        missing = 2 - len(shape)
        matrix = draw([1] * missing + list(shape), [(0, 1)] * missing + list(ranges), seed, name, fill)
        return matrix.reshape([stop - start for start, stop in ranges])
    # Whatever default dtype and device the model is built with.
    out = torch.empty([stop - start for start, stop in ranges], **_DRAWN)
    generator = torch.Generator()
    *leading, rows, columns = ranges
    for index in itertools.product(*(range(start, stop) for start, stop in leading)):
        matrix = out[tuple(i - start for i, (start, _) in zip(index, leading, strict=True))]
        for row, column in itertools.product(_tiles(rows, _TILE[0]), _tiles(columns, _TILE[1])):
            size = min(_TILE[0], shape[-2] - row * _TILE[0]), min(_TILE[1], shape[-1] - column * _TILE[1])
            tile = torch.empty(size, **_DRAWN)
            fill(tile, generator.manual_seed(_hash(seed, name, *index, row, column)))
            (inner_rows, outer_rows) = _overlap(rows, row * _TILE[0], tile.shape[0])
            (inner_columns, outer_columns) = _overlap(columns, column * _TILE[1], tile.shape[1])
            matrix[outer_rows, outer_columns] = tile[inner_rows, inner_columns]
    return out


def normal(std: float) -> Fill:
    """Fill from N(0, std^2)."""
    return functools.partial(_normal, std=std)


def uniform(bound: float) -> Fill:
    """Fill from U(-bound, bound)."""
    return functools.partial(_uniform, bound=bound)


def zeros(tile: Tensor, generator: torch.Generator) -> None:
    """Fill with 0."""
    tile.zero_()


def shared_seed() -> int:
    """A seed from torch's default CPU generator: ranks that were seeded alike and have drawn alike agree on it."""
    return int(torch.randint(2**62, (), device="cpu"))


def linear_bound(in_features: int) -> float:
    """The bound of torch's default initialisation of a linear layer: 1 / sqrt(in_features)."""
    return 1 / math.sqrt(max(in_features, 1))


def _normal(tile: Tensor, generator: torch.Generator, *, std: float) -> None:
    tile.normal_(0.0, std, generator=generator)


def _uniform(tile: Tensor, generator: torch.Generator, *, bound: float) -> None:
    tile.uniform_(-bound, bound, generator=generator)


def _tiles(extent: Range, size: int) -> range:
    start, stop = extent
    return range(start // size, -(-stop // size)) if stop > start else range(0)


def _overlap(extent: Range, tile_start: int, tile_size: int) -> tuple[slice, slice]:
    """Where a tile and a range meet: as a slice of the tile, and as a slice of the range."""
    start, stop = max(extent[0], tile_start), min(extent[1], tile_start + tile_size)
    return slice(start - tile_start, stop - tile_start), slice(start - extent[0], stop - extent[0])


def _hash(*key: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
