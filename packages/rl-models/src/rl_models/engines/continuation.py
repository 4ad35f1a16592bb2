"""Decoding step by step: packing the tokens that follow what each sequence already has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import PackedSequence
from rl_models.engines.padding import pad_to
from rl_models.grid import Grid


def continue_sequences(tokens: Sequence[Tensor], lengths: Sequence[int], multiple_of: int) -> PackedSequence:
    """Pack new tokens of sequences that already have `lengths` tokens: their positions go on from there.

    A sequence without new tokens keeps its place; where none has any, padding alone is packed.
    """
    packed = PackedSequence.from_sequences(tokens, multiple_of=multiple_of)
    if not packed.num_tokens:
        packed = pad_to(packed, multiple_of)
    starts = torch.tensor([*lengths, *[0] * (packed.padding > 0)], device=packed.position_ids.device)
    counts = packed.cu_seqlens.diff().long()
    shift = torch.repeat_interleave(starts, counts, output_size=packed.num_tokens)
    return PackedSequence(
        packed.input_ids, packed.position_ids + shift, packed.cu_seqlens, packed.max_seqlen, packed.padding
    )


def on_all_ranks(logits: Tensor | None, shape: tuple[int, int], grid: Grid) -> Tensor:
    """Return the logits of the last pipeline stage on every rank.

    They are those of its first context-parallel rank: each of these ranks has computed all logits, and may have met
    its tokens in another order at the experts.

    Args:
        logits: `[N, V]` on the last stage; None elsewhere.
        shape: (N, V).
        grid: Where the model stands.
    """
    result = torch.empty(shape, device=grid.device) if logits is None else logits.contiguous()
    if (context := grid.group("cp")) is not None:
        dist.broadcast(result, group=context, group_src=0)
    if (stages := grid.group("pp")) is not None:
        dist.broadcast(result, group=stages, group_src=stages.size() - 1)
    return result
