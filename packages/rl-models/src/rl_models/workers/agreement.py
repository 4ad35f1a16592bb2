"""Ranks that work on one batch together are given the same one; anything else is an error on all of them, no hang."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from ckpt import all_gather_json
from rl_models.grid import Grid


def described(lengths: Sequence[int], *tensors: Tensor) -> str:
    """Sequences in a few words, which differ where the sequences do. What is on a device is not looked at: that would
    stall it."""
    value = zlib.crc32(repr(list(lengths)).encode())
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.nbytes:
            own = tensor.contiguous()
            value = zlib.crc32((ctypes.c_char * own.nbytes).from_address(own.data_ptr()), value)
    return f"{len(lengths)} sequences of {sum(lengths)} tokens (checksum {value:08x})"


def require_same_call(grid: Grid, given: Mapping[str, object], **options: object) -> None:
    """Refuse a call that ranks make with other arguments, before they wait for each other in it.

    Args:
        grid: of the ranks.
        given: what ranks that differ in tp, cp or pp alone must pass alike; data-parallel ranks each have their own.
        options: what all ranks must pass alike.

    Communication: one small all-gather.

    Raises:
        ValueError: they differ; names the argument and two ranks' values; the same on every rank.
    """
    own = [[f"{name}: {value!r}" for name, value in values.items()] for values in (given, options)]
    passed = all_gather_json([grid.rank("dp"), *own], grid.everyone)
    first: dict[int, int] = {}
    for rank, (place, here, everywhere) in enumerate(passed):
        other = first.setdefault(place, rank)
        for value, expected in zip(here, passed[other][1], strict=True):
            if value != expected:
                raise ValueError(
                    f"ranks {other} and {rank} differ in tp, cp or pp alone and work on the same sequences, but rank "
                    f"{other} was given {expected:.300} and rank {rank} {value:.300}; give them the same, and divide "
                    "data by the place in dp, not by the rank"
                )
        for value, expected in zip(everywhere, passed[0][2], strict=True):
            if value != expected:
                raise ValueError(
                    f"rank 0 was given {expected:.300} and rank {rank} {value:.300}; give every rank the same"
                )
