"""The tensors of a weight sync, and the buckets that carry them.

An engine takes every tensor of its model once, whole and under its Hugging Face name. An engine in FP8 takes the
projections in FP8 by blocks, each followed by its scales (`ckpt.files.block_fp8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

import ckpt
from ckpt import AdapterLayout, Canonical, Checkpoint
from ckpt.files import BLOCK, SCALE, is_quantized, quantization_config, scales_shape, stacked_experts
from ckpt.transfer import adapter_shapes
from parallel_layers.device import on_gpu
from rl_models.calls import checksum

NamedTensors = Iterator[tuple[str, Tensor]]

BUCKET_BYTES = 64 << 20
# A GPU copies this number of bytes to another one in about a millisecond, in which the host prepares the next bucket.
_GPU_BUCKET_BYTES = 256 << 20
# Each tensor of a bucket, and each box of a round, begins at a multiple of this number of bytes, as views of any dtype
# need; a checksum takes as many.
ALIGNMENT = 16


def expected_tensors(model: str | Path | Checkpoint) -> dict[str, Canonical]:
    """Return the tensors of a checkpoint folder's model, by Hugging Face name.

    Multi-token-prediction layers are optional: only the native backend carries them.
    """
    layout = ckpt.layout_for(model)
    required = replace(layout, prediction_layers=0).canonical
    return {n: entry if n in required else replace(entry, optional=True) for n, entry in layout.canonical.items()}


Quantization = Literal["fp8"]


@dataclass(frozen=True)
class WeightFormat:
    """The format in which a weight sync sends the weights.

    Attributes:
        expected: The tensors that must arrive, by name.
        stream_options: The options of `stream_weights` that yield these tensors.
        starts_empty: The engine starts without weights, and needs a weight sync before it generates.
    """

    expected: dict[str, Canonical]
    stream_options: dict[str, Any] = field(default_factory=dict)
    starts_empty: bool = False

    @classmethod
    def of_weights(cls, model: str | Path | Checkpoint, quantization: Quantization | None = None) -> WeightFormat:
        """Return the format for an engine of a checkpoint folder's model, with plain weights or quantized ones.

        Raises:
            ValueError: The quantization is unknown, the model has experts that FP8 leaves out, or a projection has a
                size that is not a multiple of 128.
        """
        expected = expected_tensors(model)
        if quantization is None:
            return cls(expected)
        if quantization not in get_args(Quantization):
            raise ValueError(f"quantization={quantization!r} is unknown; use 'fp8', or None for plain weights")
        shapes = {name: entry.shape for name, entry in expected.items()}
        if stacked := stacked_experts(shapes):
            raise ValueError(
                f"quantization='fp8' is not for {model}: vLLM reads no block scales for experts that files stack in "
                f"one tensor ({', '.join(stacked)}); leave quantization out"
            )
        quantized = {name: entry for name, entry in expected.items() if is_quantized(name, entry.shape)}
        for name, entry in quantized.items():
            # vLLM quantizes inputs by groups of 128, and needs whole blocks of keys between its queries and values.
            multiples = entry.shape if name.endswith(".k_proj.weight") else entry.shape[1:]
            if odd := [size for size in multiples if size % BLOCK]:
                raise ValueError(
                    f"quantization='fp8' is not for {model}: {name} is {list(entry.shape)}, and vLLM needs a multiple "
                    f"of {BLOCK} where it has {odd[0]}; leave quantization out, or take a model of such sizes"
                )
        scales = {n + SCALE: Canonical(scales_shape(e.shape), optional=e.optional) for n, e in quantized.items()}
        return cls(expected | scales, {"format": quantization}, starts_empty=True)

    @classmethod
    def of_adapters(cls, layout: AdapterLayout) -> WeightFormat:
        """Return the format that sends the low-rank adapters alone."""
        return cls(adapter_shapes(layout), {"adapter": True})

    @property
    def quantization_config(self) -> dict[str, Any]:
        """Return the `quantization_config` of an engine that takes these tensors in FP8."""
        return quantization_config({n: entry.shape for n, entry in self.expected.items() if not n.endswith(SCALE)})


def complete(named_tensors: Iterable[tuple[str, Tensor]], expected: dict[str, Canonical]) -> NamedTensors:
    """Yield the tensors, and check that they are the expected ones.

    Raises:
        ValueError: A name is unknown or comes twice, a shape is wrong, or at the end a tensor is missing.
    """
    seen: set[str] = set()
    for name, tensor in named_tensors:
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


class BucketEntry(NamedTuple):
    """A tensor of a bucket, or a part of one: `length` elements from the index `first` on.

    They are at the byte `begin` of the bucket; with `checked` their checksum lies before them.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    first: int
    length: int
    checked: bool

    @property
    def end(self) -> int:
        """Return the first byte behind the elements."""
        return self.begin + self.length * self.dtype.itemsize


# The contents of a bucket; a weight sync's plan is a list of them.
BucketPlan = list[BucketEntry]


class Bucket(NamedTuple):
    """Tensors in one half of a ring `[2, bytes]` uint8; the bucket after the next has the same half."""

    entries: BucketPlan
    ring: Tensor
    half: int

    @property
    def data(self) -> Tensor:
        """Return the bytes `[bytes]` of the bucket."""
        return self.ring[self.half, : self.entries[-1].end]


def default_bucket_bytes(on_gpu: bool) -> int:
    """Return the default size of a bucket, on a GPU or a CPU."""
    return _GPU_BUCKET_BYTES if on_gpu else BUCKET_BYTES


def in_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], most_bytes: int | None = None, *, check: bool
) -> Iterator[Bucket]:
    """Copy tensors to buckets; the bucket after the next overwrites a bucket's memory.

    Args:
        named_tensors: The tensors, on one device. A tensor larger than a bucket is cut.
        most_bytes: The size of a bucket, at least 32 bytes (default: 256 MiB on a GPU, 64 MiB on a CPU).
        check: Send a checksum of each tensor.
    """
    ring = torch.empty(2, 0, dtype=torch.uint8)
    room = ALIGNMENT if check else 0
    entries: BucketPlan = []
    size = half = 0
    for name, tensor in named_tensors:
        if not size:
            size = aligned(max(most_bytes or default_bucket_bytes(on_gpu(tensor)), 2 * ALIGNMENT))
            ring = torch.empty(2, size, dtype=torch.uint8, device=tensor.device)
        values, length = tensor.detach().reshape(-1), (size - room) // tensor.element_size()
        for first in range(0, max(1, len(values)), length):
            part = values[first : first + length]
            begin = aligned(entries[-1].end if entries else 0) + room
            if entries and begin + part.nbytes > size:
                yield Bucket(entries, ring, half)
                entries, half, begin = [], 1 - half, room
            entries.append(BucketEntry(name, tensor.dtype, tensor.shape, begin, first, len(part), check))
            _values(entries[-1], ring[half]).copy_(part)
            if check:
                _checksum(entries[-1], ring[half]).copy_(checksum(part))
    if entries:
        yield Bucket(entries, ring, half)


def unpack(buckets: Iterable[Bucket]) -> NamedTensors:
    """Yield the tensors of buckets, in place; a tensor's memory is valid until the next tensor is taken.

    Raises:
        ValueError: A checksum differs.
    """
    whole = torch.empty(0)
    for bucket in buckets:
        for entry in bucket.entries:
            values, size = _values(entry, bucket.data), entry.shape.numel()
            if entry.checked and int(_checksum(entry, bucket.data)) != int(checksum(values)):
                raise ValueError(f"{entry.name} arrived with other bits than were sent: its checksum differs")
            if entry.length < size:
                if entry.first == 0:
                    whole = values.new_empty(size)
                whole[entry.first : entry.first + entry.length] = values
                values = whole
            if entry.first + entry.length == size:
                yield entry.name, values.view(entry.shape)
                whole = torch.empty(0)


def aligned(size: int) -> int:
    """Return the bytes of a tensor or a box with what lies behind it, up to the next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _values(entry: BucketEntry, data: Tensor) -> Tensor:
    """Return the elements `[length]` of an entry in the bytes of its bucket."""
    return data[entry.begin : entry.end].view(entry.dtype)


def _checksum(entry: BucketEntry, data: Tensor) -> Tensor:
    """Return the checksum of an entry in the bytes of its bucket."""
    return data[entry.begin - ALIGNMENT : entry.begin - ALIGNMENT // 2].view(torch.int64)[0]
