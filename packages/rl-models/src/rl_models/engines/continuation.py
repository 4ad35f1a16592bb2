"""Decoding step by step: packing the tokens that follow what each sequence already has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache
from rl_models.engines.padding import pad_to
from rl_models.grid import Grid


class Continuation:
    """The sequences that decoding continues.

    Args:
        caches: The caches of this rank's chunks.
        num_sequences: The number of sequences, which are empty at first.
        multiple_of: The tokens of a pack are padded to a multiple of this number.
    """

    def __init__(self, caches: Sequence[SequenceCache], num_sequences: int, multiple_of: int) -> None:
        self.caches, self.multiple_of = caches, multiple_of
        self.lengths = [0] * num_sequences

    def pack(self, tokens: Sequence[Tensor], keep: Sequence[int] | None) -> PackedSequence:
        """Pack the new tokens of each sequence, with the positions that follow; see `NextLogits` for the arguments.

        A sequence without new tokens keeps its place. Without any new token the pack holds padding alone.
        """
        if keep is not None:
            for cache in self.caches:
                cache.select(keep)
            self.lengths = [self.lengths[n] for n in keep]
        packed = PackedSequence.from_sequences(tokens, multiple_of=self.multiple_of)
        if not packed.num_tokens:
            packed = pad_to(packed, self.multiple_of)
        starts = torch.tensor([*self.lengths, *[0] * (packed.padding > 0)], device=packed.position_ids.device)
        counts = packed.cu_seqlens.diff().long()
        shift = torch.repeat_interleave(starts, counts, output_size=packed.num_tokens)
        self.lengths = [length + len(new) for length, new in zip(self.lengths, tokens, strict=True)]
        return replace(packed, position_ids=packed.position_ids + shift)


def on_all_ranks(logits: Tensor | None, shape: tuple[int, int], grid: Grid) -> Tensor:
    """Return the logits of the last pipeline stage on every rank.

    The first context-parallel rank sends its logits: the other context-parallel ranks may have summed the same tokens
    in another order at the experts.

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
