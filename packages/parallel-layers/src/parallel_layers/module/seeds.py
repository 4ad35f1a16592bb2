"""Hashes that turn a seed, names, ranks and steps into further seeds and random numbers, for all packages.

A random number is a function of names and places, so it is the same on every grid, and no state of a generator has to
be saved. The numbers stay the same over releases, because a resumed run continues with them; each caller's test pins
them. New callers take `hashed_seed(*key)`; other sizes, byte orders and hashes remain for their numbers alone.

| function | hash | turns |
|---|---|---|
| `hashed_seed` | BLAKE2b | a seed and names into initial weights, streams of ranks, keys of steps, seeds of prompts |
| `crc_seed` | CRC-32 | a seed, an update and ranks into the dropout of adapters |
| `rank_seed` | splitmix64 | a seed and a data-parallel rank into the draws of responses |
| `python_random` | Python's own | a seed, steps and epochs into orders of prompts and of mini-batches |
| `mixed`, `mixed_pairs` | Ellis's 32 bits | places of elements into the random bits of stochastic rounding |
| `shared_seed` | (a draw) | the state of torch's CPU generator into a seed |
"""

from __future__ import annotations

import hashlib
import random
import zlib
from typing import Literal

import torch
from torch import Tensor

_32_BITS, _64_BITS = 2**32 - 1, 2**64 - 1
# The odd integer next to 2^32 divided by the golden ratio: its multiples are spread evenly.
_SPREAD = 0x9E3779B9


def hashed_seed(*key: object, size: int = 8, byteorder: Literal["little", "big"] = "little") -> int:
    """Return the BLAKE2b digest of a key as an integer of `size` bytes; its text has "/" between the parts."""
    return int.from_bytes(hashlib.blake2b(_text(key), digest_size=size).digest(), byteorder)


def crc_seed(*key: object) -> int:
    """Return the CRC-32 of a key, whose text has "/" between the parts."""
    return zlib.crc32(_text(key))


def rank_seed(seed: int, rank: int) -> int:
    """Return a seed below 2^63 for a rank: splitmix64's finaliser (Steele et al. 2014) makes streams unrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return (z ^ (z >> 31)) & (2**63 - 1)


def python_random(*key: object) -> random.Random:
    """Return a generator of Python's for a key, whose text has "/" between the parts."""
    return random.Random(_text(key).decode())


def mixed(x: Tensor) -> Tensor:
    """Mix the lowest 32 bits of int64 numbers (a bijection by Ellis, https://github.com/skeeto/hash-prospector)."""
    x = x & _32_BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _32_BITS
    return x ^ (x >> 16)


def mixed_pairs(hashes: Tensor, numbers: Tensor) -> Tensor:
    """Return a hash in `[0, 2^32)` of each pair of a hash `[R]` and a number `[C]`: `[R, C]` int64."""
    return mixed(hashes[:, None] + numbers * _SPREAD)


def shared_seed() -> int:
    """Draw a seed from torch's default CPU generator; ranks with the same generator state get the same seed."""
    return int(torch.randint(2**62, (), device="cpu"))


def _text(key: tuple[object, ...]) -> bytes:
    return "/".join(map(str, key)).encode()
