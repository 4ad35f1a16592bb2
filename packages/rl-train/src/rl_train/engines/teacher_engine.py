"""`TeacherEngine`: the teacher of a run in engines beside the policy, which read responses and return log-probs.

The engines are a model of this process (`NativeReader`), or engines in other processes (`ReadingProcesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.transfer import agree_on_first
from rl_models import Actor, Batch
from rl_models.calls import TEACHER_IDS, TEACHER_LOG_PROBS, divide
from rl_train.cluster.launch import from_first
from rl_train.engines.interface import ReadingEngine, SequenceLogProbs
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Process

# A call that loses a process so often ends the run.
_MOST_LOSSES = 3


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


class ReadingProcesses:
    """A `ReadingEngine`: engines in processes of this machine, on devices of their own.

    The processes are started here, and ended by `close`. One that ends or hangs is started again, with its sequences,
    up to twice in a call.

    Raises:
        Exception: An engine does not start.
    """

    def __init__(self, engines: Sequence[Process]) -> None:
        self._processes = engines
        try:
            for process in self._processes:
                process.start()
            for process in self._processes:
                process.ready()
        except BaseException:
            self.close()
            raise

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        """See `ReadingEngine`."""
        results: list[SequenceLogProbs | None] = [None] * len(sequences)
        division = divide([len(sequence) for sequence in sequences], len(self._processes))
        for attempt in range(_MOST_LOSSES):
            calls = [
                (process, numbers, process.submit("read", [sequences[i] for i in numbers], top_k))
                for process, numbers in zip(self._processes, division, strict=True)
                if any(results[i] is None for i in numbers)
            ]
            for process, numbers, call in calls:
                try:
                    for i, result in zip(numbers, call.result(), strict=True):
                        results[i] = result
                except ProcessLost:
                    if attempt == _MOST_LOSSES - 1:
                        raise
                    process.restart()
                    process.ready()
        return [result for result in results if result is not None]

    def close(self) -> None:
        """See `ReadingEngine`."""
        for process in self._processes:
            process.close()


class TeacherEngine:
    """A `ReadingEngine` on the first of the ranks that all hold the batch; its log-probs go to all ranks.

    `start` makes the engine, on the first rank. The group is None for one process.

    Raises:
        Exception: The engine does not start; on every rank alike.
    """

    def __init__(self, start: Callable[[], ReadingEngine], group: ProcessGroup | None) -> None:
        self._group, self._engine = group, None
        self._engine = agree_on_first(start, group)

    def read(self, batch: Batch, top_k: int) -> Mapping[str, Tensor]:
        """Return the fields of a batch's teacher: with `top_k` for a divergence, else `reference_log_probs` `[T]`.

        Each is aligned with the batch's tokens; first tokens have ids of -1, and log-probs of 0.

        Raises:
            Exception: The engine's error, on every rank alike.
        """
        engine = self._engine
        rows = [sequence.tolist() for sequence in batch.split()]
        results: list[SequenceLogProbs] = from_first(lambda: engine and engine.read(rows, top_k), self._group)
        if not top_k:
            return {"reference_log_probs": torch.cat([result.log_probs for result in results])}
        return {
            TEACHER_IDS: torch.cat([result.top_ids for result in results]),
            TEACHER_LOG_PROBS: torch.cat([result.top_log_probs for result in results]),
        }

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
