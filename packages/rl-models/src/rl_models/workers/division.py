"""`Division`: a batch in micro-batches of at most so many tokens, as an engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.data.micro_batches import split_micro_batches
from rl_models.batch import Batch
from rl_models.engines import Engine
from rl_models.engines.padding import nothing


@dataclass(frozen=True)
class Division:
    """One data-parallel rank's part of a batch in micro-batches, equally many on all dp ranks; some may be empty.

    Attributes:
        indices: The sequences of each micro-batch.
        parts: The micro-batches.
        positions: Where in the batch the tokens of each micro-batch stand.
        packed: The micro-batches as the engine takes them; an empty one is padding alone, so that ranks run in step.
    """

    indices: Sequence[Sequence[int]]
    parts: Sequence[Batch]
    positions: Sequence[Tensor]
    packed: Sequence[PackedSequence]

    @staticmethod
    def least(lengths: Sequence[int], engine: Engine, max_tokens: int) -> int:
        """Return the smallest number of micro-batches into which sequences of these lengths fit.

        Raises:
            ValueError: A sequence is longer than `max_tokens`.
        """
        return len(split_micro_batches(lengths, max_tokens, count_multiple_of=engine.micro_batches_multiple_of))

    @classmethod
    def of(cls, batch: Batch, engine: Engine, max_tokens: int, count: int) -> Self:
        """Divide so that the micro-batches are about equal work.

        Args:
            batch: On the engine's device.
            engine: Says what the number of micro-batches and their tokens must be multiples of.
            max_tokens: The most tokens of a micro-batch.
            count: The number of micro-batches: the largest `least` of all data-parallel ranks.
        """
        divided = split_micro_batches(
            batch.lengths, max_tokens, count_multiple_of=engine.micro_batches_multiple_of, min_count=count
        )
        # Sequences without tokens are no work, and Megatron's layers take no input without tokens.
        indices = [[i for i in chosen if batch.lengths[i]] for chosen in divided]
        parts = [batch.select(chosen) for chosen in indices]
        multiple = engine.tokens_multiple_of
        packed = [
            part.packed(multiple_of=multiple) if part.num_tokens else nothing(multiple, batch.device) for part in parts
        ]
        return cls(indices, parts, [batch.positions(chosen) for chosen in indices], packed)


def shift_to_own_token(per_token: Tensor, batch: Batch) -> Tensor:
    """Return `result[t] = per_token[t - 1]`, 0 for each sequence's first token: from "after token t" to "of token t".

    A model says at each token something of the next one. Args: `[T]` or longer (padding at the end is dropped).
    """
    if not batch.num_tokens:
        return per_token[:0]
    moved = torch.cat([per_token.new_zeros(1), per_token[: batch.num_tokens - 1]])
    return torch.where(batch.first, 0, moved)
