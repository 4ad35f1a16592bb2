"""Digests: three numbers of a tensor that tell whether two ranks hold the same one, without sending the tensor.

Integers and bools have an exact checksum. Floating-point tensors have two random projections and their norm, compared
with a tolerance: ranks that compute one number in different orders of summation may differ in its last bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Elements that are mixed at a time: a field of routing may be larger than what a device has to spare.
CHUNK = 1 << 20
# Relative to the tensor's norm; fp32 numbers summed in two orders differ by about 1e-6 of it.
TOLERANCE = 1e-4

# The odd constants of splitmix64's finaliser (Steele et al. 2014), as int64.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Digest(NamedTuple):
    """What ranks compare of a tensor; JSON writes it as a list.

    Attributes:
        kind: shape and dtype.
        checksum: of integers and bools; 0 of floating-point numbers.
        projections: of floating-point numbers; empty of integers.
        norm: of floating-point numbers; 0 of integers.
    """

    kind: str
    checksum: int
    projections: list[float]
    norm: float

    def same(self, other: Digest) -> bool:
        """Whether the two are, but for last bits, digests of one tensor."""
        if (self.kind, self.checksum, len(self.projections)) != (other.kind, other.checksum, len(other.projections)):
            return False
        # Numbers that are not finite compare by their names: "nan" equals "nan".
        return all(
            repr(a) == repr(b) or abs(a - b) <= TOLERANCE * max(self.norm, other.norm)
            for a, b in zip(self.projections, other.projections, strict=True)
        )

    def __str__(self) -> str:
        found = f"norm {self.norm:.6g}" if self.projections else f"checksum {self.checksum % 2**32:08x}"
        return f"{self.kind} ({found})"


def described_lengths(lengths: Sequence[int]) -> str:
    """Say how long sequences are, in a few words that differ where the lengths do."""
    return f"{len(lengths)} sequences of {sum(lengths)} tokens (lengths {zlib.crc32(repr(list(lengths)).encode()):08x})"


def digests(tensors: Mapping[str, Tensor], *more: Tensor) -> tuple[dict[str, Digest], list[list[int]]]:
    """Digest tensors, and bring further small int64 tensors `[n]` of the same device to the host in the same copy.

    Returns:
        The digests by name, and the further tensors as lists. A device is waited for once.
    """
    rows = [_row(tensor.detach().reshape(-1)) for tensor in tensors.values()]
    if not rows and not more:
        return {}, []
    parts = torch.cat([*rows, *more]).cpu().split([3] * len(rows) + [len(part) for part in more])
    found = {}
    for (name, tensor), row in zip(tensors.items(), parts, strict=False):
        kind = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.is_floating_point():
            first, second, square = row.view(torch.float64).tolist()
            found[name] = Digest(kind, 0, [first, second], math.sqrt(square))
        else:
            found[name] = Digest(kind, int(row[0]), [], 0.0)
    return found, [part.tolist() for part in parts[len(rows) :]]


def _row(flat: Tensor) -> Tensor:
    """`[3]` int64: the checksum, or the bits of two projections and of the squared norm."""
    if flat.is_floating_point():
        sums = torch.zeros(3, dtype=torch.float64, device=flat.device)
        for start, weights in _weights(len(flat), flat.device):
            part = flat[start : start + len(weights)].double()
            # Random signs alone would often miss that two elements are exchanged.
            sums += torch.stack([part @ _uniform(weights), part @ _uniform(_mixed(~weights)), part @ part])
        return sums.view(torch.int64)
    raw = flat.contiguous().view(torch.uint8)
    # The copy also aligns the bytes, which a slice of a tensor need not be.
    words = F.pad(raw, (0, -len(raw) % 8)).clone().view(torch.int64)
    total = words.new_zeros(3)
    for start, weights in _weights(len(words), words.device):
        total[0] += _mixed(words[start : start + len(weights)] + weights).sum()
    return total


def _weights(count: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The chunks of `count` elements: where each starts, and a random int64 for each place, the same on every rank."""
    for start in range(0, count, CHUNK):
        yield start, _mixed(torch.arange(start, min(start + CHUNK, count), device=device))


def _mixed(values: Tensor) -> Tensor:
    """A hash of int64 numbers; products wrap."""
    values = (values + 1) * _FIRST
    values = (values ^ (values >> 32)) * _SECOND
    return values ^ (values >> 29)


def _uniform(hashes: Tensor) -> Tensor:
    """Weights in [-1, 1) from hashes."""
    return hashes.double() / 2.0**63
