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
from rl_models.calls import checksum as checksum_on_device

NamedTensors = Iterator[tuple[str, Tensor]]

BUCKET_BYTES = 64 << 20
# Each tensor of a bucket begins at a multiple of this number of bytes, as views of any dtype need.
_ALIGNMENT = 16


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


def checksum(tensor: Tensor) -> int:
    """Return an exact checksum of the bits, computed on the tensor's device."""
    return int(checksum_on_device(tensor))


class BucketEntry(NamedTuple):
    """A tensor of a bucket, whose first byte is at `begin`."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    checksum: int | None


class Bucket(NamedTuple):
    """Tensors in one buffer `[bytes]` uint8."""

    entries: list[BucketEntry]
    data: Tensor


def in_buckets(named_tensors: Iterable[tuple[str, Tensor]], most_bytes: int, *, check: bool) -> Iterator[Bucket]:
    """Copy tensors to buckets of at most `most_bytes`, or of one larger tensor; on request with checksums.

    The next bucket may overwrite the memory of a bucket on the CPU. On a GPU each bucket has its own memory, because
    an engine on the same device reads it in place.
    """
    entries: list[BucketEntry] = []
    buffer, end = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in named_tensors:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if entries and begin + tensor.nbytes > most_bytes:
            yield Bucket(entries, buffer[:end])
            entries, begin = [], 0
            if buffer.is_cuda:
                buffer = buffer.new_empty(0)
        end = begin + tensor.nbytes
        if not entries and (end > len(buffer) or buffer.device != tensor.device):
            del buffer  # frees it before the next one is made
            buffer = torch.empty(max(end, most_bytes), dtype=torch.uint8, device=tensor.device)
        buffer[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        entries.append(BucketEntry(name, tensor.dtype, tensor.shape, begin, checksum(tensor) if check else None))
    if entries:
        yield Bucket(entries, buffer[:end])


def unpack(bucket: Bucket) -> NamedTensors:
    """Yield the tensors of a bucket, in place.

    Raises:
        ValueError: A checksum differs.
    """
    for name, dtype, shape, begin, expected in bucket.entries:
        tensor = bucket.data[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        if expected is not None and checksum(tensor) != expected:
            raise ValueError(f"{name} arrived with other bits than were sent: its checksum differs")
        yield name, tensor
