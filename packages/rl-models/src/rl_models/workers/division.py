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
from rl_models.workers.routing import ROUTING


@dataclass(frozen=True)
class Division:
    """One data-parallel rank's part of a batch in micro-batches, equally many on all dp ranks; some may be empty.

    Attributes:
        batch: on the engine's device.
        indices: the sequences of each micro-batch.
        parts: the micro-batches. An empty one is one token outside the mask: the ranks must run in step.
        packed: as the engine takes them; an empty one is padding alone.
    """

    batch: Batch
    indices: Sequence[Sequence[int]]
    parts: Sequence[Batch]
    packed: Sequence[PackedSequence]

    @classmethod
    def of(cls, batch: Batch, engine: Engine, max_tokens: int) -> Self:
        """Divide so that the micro-batches are about equal work.

        Args:
            batch: on the engine's device.
            engine: says how many micro-batches there must be, and what their tokens must be a multiple of.
            max_tokens: of a micro-batch.

        Raises:
            ValueError: a sequence is longer than `max_tokens`.
        """
        divided = split_micro_batches(
            batch.lengths,
            max_tokens,
            group=engine.grid.group("dp"),
            count_multiple_of=engine.micro_batches_multiple_of,
        )
        # Sequences without tokens are no work, and Megatron's layers take no input without tokens.
        indices = [[i for i in chosen if batch.lengths[i]] for chosen in divided]
        parts = [batch.select(chosen) if chosen else _stand_in(batch) for chosen in indices]
        multiple = engine.tokens_multiple_of
        packed = [
            part.packed(multiple_of=multiple) if chosen else nothing(multiple, batch.device)
            for chosen, part in zip(indices, parts, strict=True)
        ]
        return cls(batch, indices, parts, packed)

    @property
    def positions(self) -> list[Tensor]:
        """Where in the batch the tokens of each micro-batch stand; nowhere for an empty one."""
        return [self.batch.positions(chosen) for chosen in self.indices]


def _stand_in(batch: Batch) -> Batch:
    """One token outside the mask, with the fields of `batch`."""
    fields = {
        name: tensor.new_full((1, *tensor.shape[1:]), -1 if name == ROUTING else 0)
        for name, tensor in batch.fields.items()
    }
    return Batch(batch.tokens.new_zeros(1), (1,), batch.mask.new_zeros(1), fields)


def shift_to_own_token(per_token: Tensor, batch: Batch) -> Tensor:
    """From "after token t" to "of token t": `result[t] = per_token[t - 1]`, 0 for each sequence's first token.

    A model says at each token something of the next one. Args: `[T]` or longer (padding at the end is dropped).
    """
    if not batch.num_tokens:
        return per_token[:0]
    moved = torch.cat([per_token.new_zeros(1), per_token[: batch.num_tokens - 1]])
    return torch.where(batch.first, 0, moved)
