"""Initial weights as functions of the seed and the parameter's name, the same on every parallel grid.

The last two dims of the full tensor are cut into fixed tiles. A CPU generator seeded with a hash of (seed, name, tile)
draws each tile as a whole. A rank draws the tiles that overlap its part. CUDA parameters are drawn on the CPU, too, so
the values do not depend on the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel_layers.module.seeds import hashed_seed
from parallel_layers.module.sharding import blocks_of, full_shape, is_dtensor

# Large enough to hide Python's overhead, small enough that a shard draws few unused numbers.
_TILE = (128, 1024)
# Rows of a tile that are copied at once. torch copies 32768 numbers or more on all cores, whose start takes longer.
_COPIED = 16
# Independent of torch's default dtype and device.
_DRAWN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}

Fill = Callable[[Tensor, torch.Generator], object]
Range = tuple[int, int]


def initialize_(module: nn.Module, seed: int, *, std: float = 0.02, prefix: str = "") -> None:
    """Fill a model in place: matrices from N(0, std^2), biases with 0, the rest by `reset_parameters`.

    The rest are vectors: norms, sinks, and the decays of linear attention with their `dt_bias`.

    A parameter's values depend only on `seed`, `prefix` + its name, and its full shape. Give each pipeline stage the
    `prefix` that completes its names to the names in the whole model. Parameters on the meta device are skipped; call
    this after `to_empty`.

    Raises:
        ValueError: A parameter is already sharded by FSDP2; initialise before `fully_shard`.
    """
    filled: set[nn.Parameter] = set()
    for path, owner in module.named_modules():
        # `to_empty` leaves vectors and buffers undefined.
        vectors = [p for name, p in owner.named_parameters(recurse=False) if p.dim() < 2 and not _is_bias(name)]
        if hasattr(owner, "reset_parameters") and (vectors or any(True for _ in owner.buffers(recurse=False))):
            with torch.random.fork_rng(devices=[]):  # matrices that it draws here are drawn again later
                owner.reset_parameters()
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in filled:
                continue
            filled.add(parameter)
            canonical = prefix + (f"{path}.{name}" if path else name)
            if _is_bias(name):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                fill_parameter_(owner, name, seed, normal(std), canonical=canonical)


def _is_bias(name: str) -> bool:
    """Return whether a parameter is a bias; experts' biases are matrices, too."""
    return name.endswith("bias") and name != "dt_bias"


def fill_parameter_(module: nn.Module, name: str, seed: int, fill: Fill, *, canonical: str | None = None) -> None:
    """Fill `module`'s own parameter `name` with this rank's part of the full tensor; padding becomes 0.

    `fill` is `normal(std)`, `as_linear(in_features)`, or another function that fills a tensor from a generator;
    `canonical` the name in the hash (default: `name`).
    """
    parameter = module.get_parameter(name)
    if is_dtensor(parameter):
        raise ValueError(f"parameter {canonical or name} is a DTensor already; initialise the model before fully_shard")
    if parameter.is_meta:
        return
    with torch.no_grad():
        parameter.zero_()
        for local, full in blocks_of(module, name):
            ranges = [(side.start, side.stop) for side in full]
            parameter[local] = draw(full_shape(module, name), ranges, seed, canonical or name, fill).to(parameter)


def draw(shape: Sequence[int], ranges: Sequence[Range], seed: int, name: str, fill: Fill) -> Tensor:
    """Draw the rectangle `ranges` (start and stop of each dim) of the full tensor `name`, as fp32 on the CPU.

    The full tensor depends only on (seed, name, shape), so overlapping rectangles agree.
    """
    missing = max(2 - len(shape), 0)
    shape = [1] * missing + list(shape)
    *leading, rows, columns = [(0, 1)] * missing + list(ranges)
    out = torch.empty([stop - start for start, stop in (*leading, rows, columns)], **_DRAWN)
    generator = torch.Generator()
    for index in itertools.product(*(range(start, stop) for start, stop in leading)):
        matrix = out[tuple(i - start for i, (start, _) in zip(index, leading, strict=True))]
        for row, column in itertools.product(_tiles(rows, _TILE[0]), _tiles(columns, _TILE[1])):
            tile = torch.empty(min(_TILE[0], shape[-2] - row), min(_TILE[1], shape[-1] - column), **_DRAWN)
            key = seed, name, *index, row // _TILE[0], column // _TILE[1]
            fill(tile, generator.manual_seed(hashed_seed(*key)))
            inner_rows, outer_rows = _overlap(rows, row, tile.shape[0])
            inner_columns, outer_columns = _overlap(columns, column, tile.shape[1])
            target, source = matrix[outer_rows, outer_columns], tile[inner_rows, inner_columns]
            for rows_of_target, rows_of_source in zip(target.split(_COPIED), source.split(_COPIED), strict=True):
                rows_of_target.copy_(rows_of_source)
    return out.reshape([stop - start for start, stop in ranges])


def normal(std: float) -> Fill:
    """Fill from N(0, std^2)."""
    return lambda tile, generator: tile.normal_(0.0, std, generator=generator)


def as_linear(in_features: int) -> Fill:
    """Fill from U(-bound, bound) with bound 1 / sqrt(in_features), as torch initialises a linear layer."""
    bound = 1 / math.sqrt(max(in_features, 1))
    return lambda tile, generator: tile.uniform_(-bound, bound, generator=generator)


def _tiles(extent: Range, size: int) -> range:
    """Return the first units of the tiles that overlap a range."""
    start, stop = extent
    return range(start - start % size, stop, size)


def _overlap(extent: Range, tile_start: int, tile_size: int) -> tuple[slice, slice]:
    """Return the intersection of a tile and a range, as a slice of the tile and as a slice of the range."""
    start, stop = max(extent[0], tile_start), min(extent[1], tile_start + tile_size)
    return slice(start - tile_start, stop - tile_start), slice(start - extent[0], stop - extent[0])
