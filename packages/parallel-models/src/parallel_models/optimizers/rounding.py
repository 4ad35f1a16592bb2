"""Random numbers for stochastic rounding, as functions of an element's place in the Hugging Face tensor and the step.

No generator is drawn from, so there is no state to save, and the numbers are the same on every grid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ckpt import Block
from ckpt.layout import Box, extents
from parallel_layers.module import hashed_seed, mixed, mixed_pairs


class Coordinates(NamedTuple):
    """The place of each element of a local tensor, seen as a matrix `[R, C]`, in its canonical tensors.

    `rows` `[R]` int64 are hashes of a canonical tensor's name and the row in this tensor; `columns` `[C]` int64 are the
    columns there. A tensor of one dim has one column.
    """

    rows: Tensor
    columns: Tensor


def random_bits(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Return 32 random bits for each pair of a row's hash and a column, `[R, C]` int64 in `[0, 2^32)`."""
    return mixed_pairs(mixed(rows ^ key), columns)


def step_key(step: int) -> int:
    """Return the key of an optimizer step."""
    return hashed_seed("moments", step, size=4)


def coordinates(block: Block, device: torch.device) -> Coordinates:
    """Return the coordinates of a rank's part of a local tensor; the rows of padding are 0."""
    matrix = len(block.shape) > 1
    rows = torch.zeros(block.shape[:-1] if matrix else block.shape, dtype=torch.int64)
    columns = torch.arange(block.shape[-1] if matrix else 1)
    for piece in block.pieces:
        local_range, canonical_range = piece.local_range, piece.canonical_range
        if canonical_range is None:
            continue
        if matrix:
            columns[slice(*local_range[-1])] = torch.arange(*canonical_range[-1])
            local_range, canonical_range = local_range[:-1], canonical_range[:-1]
        hashes = _row_hashes(piece.name, canonical_range).view(extents(local_range))
        rows[tuple(slice(*side) for side in local_range)] = hashes
    return Coordinates(rows.reshape(-1).to(device), columns.to(device))


def _row_hashes(name: str, box: Box) -> Tensor:
    """Return the hash of each canonical row of a box, in row-major order."""
    hashes = torch.full((1,), hashed_seed(name, size=4))
    for start, stop in box:
        hashes = mixed_pairs(hashes, torch.arange(start, stop)).reshape(-1)
    return hashes
