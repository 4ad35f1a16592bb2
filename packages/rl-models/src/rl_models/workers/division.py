"""`Division`: a batch divided into the micro-batches of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from parallel_layers.data.micro_batches import split_micro_batches
from parallel_layers.moe import RouterReplay
from rl_models.batch import Batch
from rl_models.engines import Engine
from rl_models.engines.micro_batch import MicroBatch
from rl_models.engines.padding import nothing
from rl_models.workers.routing import ROUTING, replays


@dataclass(frozen=True)
class Division:
    """The micro-batches of one data-parallel rank, in equal number on all dp ranks; some may be empty.

    Attributes:
        micro_batches: The micro-batches; an empty one holds padding alone, so that ranks run in step.
        positions: Where in the batch the tokens of each micro-batch stand.
    """

    micro_batches: Sequence[MicroBatch]
    positions: Sequence[Tensor]

    @staticmethod
    def least(lengths: Sequence[int], engine: Engine, max_tokens: int) -> int:
        """Return the smallest number of micro-batches into which sequences of these lengths fit.

        Raises:
            ValueError: A sequence is longer than `max_tokens`.
        """
        return len(split_micro_batches(lengths, max_tokens, count_multiple_of=engine.micro_batches_multiple_of))

    @classmethod
    def of(
        cls,
        batch: Batch,
        counts: Sequence[int],
        engine: Engine,
        max_tokens: int,
        count: int,
        *,
        temperature: float,
        record: bool = False,
    ) -> Self:
        """Divide a batch into micro-batches of about equal work.

        Args:
            batch: On the engine's device.
            counts: The masked tokens of each sequence.
            engine: Says what the number of micro-batches and their tokens must be multiples of.
            max_tokens: The most tokens of a micro-batch.
            count: The number of micro-batches: the largest `least` of all data-parallel ranks.
            temperature: For every micro-batch.
            record: Record the routing.
        """
        divided = split_micro_batches(
            batch.lengths, max_tokens, count_multiple_of=engine.micro_batches_multiple_of, min_count=count
        )
        # Megatron's layers refuse an input without tokens.
        indices = [[i for i in chosen if batch.lengths[i]] for chosen in divided]
        positions = [batch.positions(chosen) for chosen in indices]
        parts, multiple = [batch.select(chosen) for chosen in indices], engine.tokens_multiple_of
        packs = [
            part.packed(multiple_of=multiple) if part.num_tokens else nothing(multiple, batch.device) for part in parts
        ]
        routes: Sequence[RouterReplay | None] = [RouterReplay() if record else None for _ in packs]
        if ROUTING in batch.fields:
            routes = replays(batch, positions, packs, engine)
        masked = [sum(counts[i] for i in chosen) for chosen in indices]
        rows = zip(packs, routes, parts, masked, strict=True)
        return cls([MicroBatch(pack, temperature, route, part, many) for pack, route, part, many in rows], positions)


def shift_to_own_token(per_token: Tensor, batch: Batch) -> Tensor:
    """Return `result[t] = per_token[t - 1]`, and 0 for the first token of each sequence.

    A model's output at a token belongs to the next token.

    Args:
        per_token: `[T]`, or longer with padding at the end, which is dropped.
        batch: The sequences.
    """
    if not batch.num_tokens:
        return per_token[:0]
    moved = torch.cat([per_token.new_zeros(1), per_token[: batch.num_tokens - 1]])
    return torch.where(batch.first, 0, moved)
