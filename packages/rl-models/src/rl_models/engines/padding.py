"""Padding of packed micro-batches up to a number of tokens."""

from __future__ import annotations

import dataclasses

import torch

from parallel_layers import PackedSequence


def nothing(num_tokens: int, device: torch.device) -> PackedSequence:
    """Return a pack of `num_tokens` tokens of padding, without sequences."""
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    return PackedSequence(ids, torch.arange(num_tokens, device=device), bounds, num_tokens, padding=num_tokens)


def pad_to(packed: PackedSequence, num_tokens: int) -> PackedSequence:
    """Return the pack with padding up to `num_tokens` as its last segment."""
    added = num_tokens - packed.num_tokens
    if not added:
        return packed
    padding = packed.padding + added
    bounds = packed.cu_seqlens[: packed.num_sequences + 1]
    kept = packed.num_tokens - packed.padding
    return dataclasses.replace(
        packed,
        input_ids=torch.cat((packed.input_ids[:kept], packed.input_ids.new_zeros(padding))),
        position_ids=torch.cat((packed.position_ids[:kept], torch.arange(padding, device=packed.position_ids.device))),
        cu_seqlens=torch.cat((bounds, bounds.new_tensor([num_tokens]))),
        max_seqlen=max(packed.max_seqlen, padding),
        padding=padding,
    )
