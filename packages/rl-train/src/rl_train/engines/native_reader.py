"""`NativeReader`: a model of this process as a teacher, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rl_models import Actor, Batch
from rl_train.engines.sequence_log_probs import SequenceLogProbs


class NativeReader:
    """A `ReadingEngine`: an `Actor` on one device, without an optimizer; it takes `max_tokens` in one forward pass.

    Raises:
        ValueError: As `Actor.from_pretrained`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_tokens: int = 16384,
    ) -> None:
        self._actor = Actor.from_pretrained(model, dtype=dtype, device=device, max_tokens_per_micro_batch=max_tokens)

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        """See `ReadingEngine`."""
        batch = Batch.from_sequences(sequences)
        top_k = min(top_k, self._actor.engine.vocab_size - 2)
        statistics = self._actor.token_statistics(batch, top_n=max(1, top_k))
        log_probs, ranks = statistics.log_probs.cpu(), statistics.ranks.cpu()
        # A further column has the token itself, where it is not among the likeliest; rank 0 has no token.
        ids = torch.cat([statistics.top_ids.cpu()[:, :top_k], batch.tokens.where(ranks > top_k, -1)[:, None]], 1)
        values = torch.cat([statistics.top_log_probs.cpu()[:, :top_k], log_probs[:, None]], 1)
        columns = (batch.split(column) for column in (log_probs, ids, values.where(ids >= 0, 0)))
        return [SequenceLogProbs(*rows) for rows in zip(*columns, strict=True)]

    def close(self) -> None:
        """Do nothing: the model goes with its process."""
