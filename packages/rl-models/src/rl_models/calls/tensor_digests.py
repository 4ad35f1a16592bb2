"""Digests: short texts by which ranks compare sequences and tensors without sending them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_models.batch.batch import Batch
from rl_models.batch.visual import Visual, described

# 8-byte words per step: the temporary tensors of a large field would not fit on the device.
CHUNK = 1 << 20

# The odd constants of splitmix64's finaliser (Steele et al. 2014), as int64.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def described_sequences(sequences: Batch | Sequence[Tensor], visual: Visual = ()) -> dict[str, str]:
    """Describe a batch, or rows of token ids and their images, in short texts that differ where these differ."""
    if isinstance(sequences, Batch):
        lengths: Sequence[int] = sequences.lengths
        tensors = {"tokens": sequences.tokens, "mask": sequences.mask, **sequences.fields}
        if (mask := sequences.sampling_mask) is not None:
            tensors |= {"sampling_mask.ids": mask.ids, "sampling_mask.offsets": mask.offsets}
        visual = sequences.visual
    else:
        lengths = [len(row) for row in sequences]
        tensors = {"tokens": torch.cat(list(sequences))} if sequences else {}
    crc = zlib.crc32(repr(list(lengths)).encode())
    text = f"{len(lengths)} of {sum(lengths)} tokens (lengths {crc:08x})"
    return {"sequences": text, **digests(tensors), "images": described(visual)}


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the shape and dtype of each tensor and, of integers and bools, an exact checksum, in one wait.

    Floating-point numbers have no checksum: ranks that compute one number in different orders of summation may differ
    in its last bits.
    """
    texts = {name: f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items()}
    checksums = {name: checksum(x) for name, x in tensors.items() if not x.is_floating_point()}
    if checksums:
        for name, number in zip(checksums, torch.stack(list(checksums.values())).tolist(), strict=True):
            texts[name] += f" (checksum {number % 2**64:016x})"
    return texts


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bytes of a tensor, int64 on its device."""
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    # The copy also aligns the bytes, which a slice of a tensor need not be.
    words = F.pad(raw, (0, -len(raw) % 8)).clone().view(torch.int64)
    total = words.new_zeros(())
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK]
        indices = torch.arange(start, start + len(chunk), device=words.device)
        total += _mixed(chunk + _mixed(indices)).sum()
    return total


def _mixed(values: Tensor) -> Tensor:
    """Hash int64 numbers; multiplications wrap."""
    values = (values + 1) * _FIRST
    values = (values ^ (values >> 32)) * _SECOND
    return values ^ (values >> 29)
