"""Digests: three numbers per tensor, by which ranks compare tensors without sending them.

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

# Elements per step: the temporary tensors of a large field would not fit on the device.
CHUNK = 1 << 20
# Relative to the tensor's norm; fp32 numbers summed in two orders differ by about 1e-6 of it.
TOLERANCE = 1e-4

# The odd constants of splitmix64's finaliser (Steele et al. 2014), as int64.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Digest(NamedTuple):
    """The digest of one tensor: its shape and dtype, and a checksum, or two projections and the norm of floats.

    JSON writes it as a list.
    """

    kind: str
    checksum: int
    projections: list[float]
    norm: float

    def same(self, other: Digest) -> bool:
        """Return whether both are digests of one tensor, up to its last bits."""
        if (self.kind, self.checksum, len(self.projections)) != (other.kind, other.checksum, len(other.projections)):
            return False
        # The texts of NaN and infinities are equal.
        return all(
            repr(a) == repr(b) or abs(a - b) <= TOLERANCE * max(self.norm, other.norm)
            for a, b in zip(self.projections, other.projections, strict=True)
        )

    def __str__(self) -> str:
        found = f"norm {self.norm:.6g}" if self.projections else f"checksum {self.checksum % 2**32:08x}"
        return f"{self.kind} ({found})"


def described_lengths(lengths: Sequence[int]) -> str:
    """Describe the lengths of sequences in a short text that differs where the lengths differ."""
    return f"{len(lengths)} sequences of {sum(lengths)} tokens (lengths {zlib.crc32(repr(list(lengths)).encode()):08x})"


def digests(tensors: Mapping[str, Tensor], *more: Tensor) -> tuple[dict[str, Digest], list[list[int]]]:
    """Digest tensors, and copy further small int64 tensors `[n]` of the same device to the host.

    Returns:
        The digests by name, and the further tensors as lists, in one wait for the device.
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
    """Return `[3]` int64: the checksum, or the bits of two projections and of the squared norm."""
    if flat.is_floating_point():
        sums = torch.zeros(3, dtype=torch.float64, device=flat.device)
        for start, weights in _weights(len(flat), flat.device):
            part = flat[start : start + len(weights)].double()
            # Random signs alone would often miss an exchange of two elements.
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
    """Yield the start of each chunk of `count` elements, and a random int64 per element, equal on every rank."""
    for start in range(0, count, CHUNK):
        yield start, _mixed(torch.arange(start, min(start + CHUNK, count), device=device))


def _mixed(values: Tensor) -> Tensor:
    """Hash int64 numbers; multiplications wrap."""
    values = (values + 1) * _FIRST
    values = (values ^ (values >> 32)) * _SECOND
    return values ^ (values >> 29)


def _uniform(hashes: Tensor) -> Tensor:
    """Turn hashes into weights in [-1, 1)."""
    return hashes.double() / 2.0**63
