"""Handing weights over: an engine takes every tensor of its model once, whole and under its Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import ckpt
from ckpt.layout.model_layout import Canonical
from rl_models.workers.digests import digests

Pairs = Iterator[tuple[str, Tensor]]
# A name, a tensor, and its checksum.
Packed = tuple[str, Tensor, int | None]

BUCKET_BYTES = 64 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def expected_tensors(model: str | Path) -> dict[str, Canonical]:
    """Return the tensors of a checkpoint folder's model, by Hugging Face name."""
    return dict(ckpt.layout_for(model).canonical)


def complete(pairs: Iterable[tuple[str, Tensor]], expected: dict[str, Canonical]) -> Pairs:
    """Yield the pairs, and check that they are the expected tensors.

    Raises:
        ValueError: A name is unknown or comes twice, a shape is wrong, or at the end a tensor is missing.
    """
    seen: set[str] = set()
    for name, tensor in pairs:
        if name not in expected:
            raise ValueError(f"the tensor {name} is not one of the model's")
        if name in seen:
            raise ValueError(f"the tensor {name} came twice")
        if tuple(tensor.shape) != tuple(expected[name].shape):
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, not {list(expected[name].shape)}")
        seen.add(name)
        yield name, tensor
    if missing := [name for name, entry in expected.items() if name not in seen and not entry.optional]:
        raise ValueError(f"the stream ended without {', '.join(missing[:3])} ({len(missing)} tensors in all)")


def checksum(tensor: Tensor) -> int:
    """Return an exact checksum of the bits, computed on the tensor's device."""
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return digests({"": bits})[0][""].checksum


def pack(bucket: Iterable[tuple[str, Tensor]], *, check: bool) -> list[Packed]:
    """Return the tensors of a bucket, contiguous, on request with checksums."""
    return [(name, tensor.detach().contiguous(), checksum(tensor) if check else None) for name, tensor in bucket]


def unpack(packed: Iterable[Packed]) -> Pairs:
    """Yield the tensors of `pack` in the process that receives them; they must stay as they are.

    Raises:
        ValueError: A checksum differs.
    """
    for name, tensor, expected in packed:
        if expected is not None and checksum(tensor) != expected:
            raise ValueError(f"{name} arrived with other bits than were sent: its checksum differs")
        yield name, tensor


def in_buckets(pairs: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Collect pairs to lists of at most `most_bytes`, or of one larger tensor."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in pairs:
        if bucket and held + tensor.nbytes > most_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
