"""`EngineOnRanks`: a `RolloutEngine` from an engine of one process on each rank, or on some of the ranks."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt import agree
from ckpt.transfer.agreement import all_gather_json
from rl_models.batch import Batch, token_rows
from rl_models.workers.agreement import Given, agree_on_call
from rl_models.workers.generation import SamplingOptions
from rl_train.data.prompts import vocabulary_size
from rl_train.rollouts.handover import BUCKET_BYTES, complete, expected_tensors
from rl_train.rollouts.local import LocalEngine, Request, Responses, WeightsLostError

# A batch whose engines are lost is repeated at most this number of times.
_MOST_REPEATS = 3


class EngineOnRanks:
    """A `RolloutEngine` on the ranks of an actor: each engine answers a part of the prompts.

    Weights come from `actor.stream_weights` in buckets; ranks without an engine take part in the exchange. Each
    prompt has a seed of its own, so responses do not depend on the number of engines.

    Args:
        actor: An `Actor` or `WholeBatches`; its grid has the ranks of the engine.
        model: The folder of the checkpoint; its config says which tensors a hand-over has.
        start: Starts this rank's engine, with the weights of `model`.
        ranks: The ranks of the grid that have an engine (default: all ranks).
        sleeps: Whether the engines sleep after each `generate`, until the next call.
        version: The version of the weights of `model`.
        bucket_bytes: The bytes of one exchange; the extra memory of a hand-over.

    Raises:
        ValueError: `ranks` are not of the grid, or `start` raises on a rank; on every rank.
    """

    def __init__(
        self,
        actor: Any,
        model: str | Path,
        start: Callable[[], LocalEngine],
        *,
        ranks: Sequence[int] | None = None,
        sleeps: bool = False,
        version: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.version, self._actor, self._grid = version, actor, actor.grid
        self._everyone = self._grid.everyone
        size = 1 if self._everyone is None else self._everyone.size()
        self._rank = 0 if self._everyone is None else self._everyone.rank()
        self._ranks = list(range(size)) if ranks is None else sorted(set(ranks))
        if not self._ranks or not set(self._ranks) <= set(range(size)):
            raise ValueError(f"ranks={ranks} must be ranks of the grid, 0 to {size - 1}")
        self._sleeps, self._bucket_bytes = sleeps, bucket_bytes
        self._expected, self._vocab_size = expected_tensors(model), vocabulary_size(Path(model))
        self._asleep, self._broken = False, ""
        self._local = agree(lambda: start() if self._rank in self._ranks else None, self._everyone)

    def generate(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Batch:
        """See `RolloutEngine`; the batch is on the CPU."""
        return self.generate_async(prompts, sampling).result()

    def generate_async(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Future[Batch]:
        """See `RolloutEngine`.

        Every rank waits by `result` or `exception`, in the same order on all ranks; a timeout has no effect.
        """
        rows: list[list[int]] = []

        def prepare() -> Given:
            nonlocal rows
            self._require_ready()
            rows = self._checked(prompts)
            return Given(everywhere={"prompts": zlib.crc32(repr(rows).encode()), **vars(sampling)})

        agree_on_call(self._grid, "EngineOnRanks.generate", prepare)
        waiting = self._begin(rows, sampling)
        return _Collected(lambda: self._collect(waiting, rows, sampling))

    def update_weights(self, actor: Any, version: int) -> None:
        """See `RolloutEngine`.

        Raises:
            RuntimeError: The engine sleeps; or the update broke off, and the engine refuses to generate until an update
                succeeds.
        """
        if self._asleep:
            raise RuntimeError("the engine sleeps; call wake() before update_weights")
        self._actor = actor
        self._hand_over(f"the update to version {version}")
        self.version = version

    def sleep(self) -> None:
        """See `RolloutEngine`."""
        self._asleep = True
        if self._local is not None:
            self._local.sleep()

    def wake(self) -> None:
        """See `RolloutEngine`."""
        self._asleep = False
        if self._local is not None:
            self._local.wake()

    def close(self) -> None:
        """See `RolloutEngine`."""
        if self._local is not None:
            self._local.close()
        self._local, self._broken = None, "the engine was closed"

    def _require_ready(self) -> None:
        if self._broken:
            raise RuntimeError(f"the engine does not generate: {self._broken}; call update_weights, or build it anew")
        if self._asleep:
            raise RuntimeError("the engine sleeps; call wake() before generate")

    def _checked(self, prompts: Sequence[Tensor | Sequence[int]]) -> list[list[int]]:
        rows = [row.tolist() for row in token_rows(prompts, "prompt")]
        for number, row in enumerate(rows):
            if not row or not 0 <= min(row) <= max(row) < self._vocab_size:
                raise ValueError(f"prompt {number} must have at least one token, each below {self._vocab_size}")
        return rows

    def _begin(self, rows: list[list[int]], sampling: SamplingOptions) -> Callable[[], Responses | None]:
        """Start on this rank's prompts; the returned function gives None where the weights must be handed over anew."""
        if self._local is None:
            return list
        place, engines = self._ranks.index(self._rank), len(self._ranks)
        numbers = range(place, len(rows), engines)
        requests = [Request(rows[number], _seed(sampling.seed, number)) for number in numbers]
        try:
            self._local.wake()
            wait = self._local.begin(requests, sampling)
        except Exception as error:  # raised on all ranks when they collect
            failure = error

            def fail() -> Responses:
                raise failure

            wait = fail

        def finish() -> Responses | None:
            try:
                return wait()
            except WeightsLostError:
                return None

        return finish

    def _collect(
        self, waiting: Callable[[], Responses | None], rows: list[list[int]], sampling: SamplingOptions
    ) -> Batch:
        """Wait for all engines, and return the whole batch on every rank."""
        for _ in range(1 + _MOST_REPEATS):
            own = agree(waiting, self._everyone)
            parts: list[Responses | None] = [own]
            if self._everyone is not None:
                parts = [None] * self._everyone.size()
                dist.all_gather_object(parts, own, group=self._everyone)
            if None not in parts:
                break
            # No engine with these weights is left: the whole batch is drawn anew, so that it has one version.
            self._hand_over("the hand-over after a restart")
            waiting = self._begin(rows, sampling)
        else:
            raise RuntimeError(f"the engines were lost {1 + _MOST_REPEATS} times while they drew one batch")
        if self._sleeps and self._local is not None:
            self._local.sleep()
        answers = [iter(parts[rank] or []) for rank in self._ranks]
        sequences, log_probs, lengths = list[list[int]](), list[Tensor](), list[int]()
        for number, row in enumerate(rows):
            for response in next(answers[number % len(answers)]):
                sequences.append(row + response.tokens)
                log_probs.append(torch.tensor([0.0] * len(row) + response.log_probs))
                lengths.append(len(response.tokens))
        return Batch.from_sequences(sequences, response_lengths=lengths, log_probs=log_probs, device="cpu")

    def _hand_over(self, what: str) -> None:
        """Stream the actor's weights into the engines.

        Raises:
            RuntimeError: The hand-over broke off on some rank; on every rank that goes on.
        """
        self._broken = f"{what} has not ended"
        for _ in range(1 + _MOST_REPEATS):
            stream = _Stream(self._actor.stream_weights(to=self._ranks, bucket_bytes=self._bucket_bytes))
            failure = self._take(stream)
            lost = isinstance(failure, WeightsLostError)

            def result(failure: Exception | None = None if lost else failure) -> None:
                if failure is not None:
                    raise failure

            try:
                # Without a message to the other ranks if the stream itself failed: they may be inside its exchange.
                agree(result, None if stream.failed else self._everyone)
            except Exception as error:
                self._broken = f"{what} broke off: {error}"
                raise RuntimeError(self._broken) from error
            if not any(all_gather_json(lost, self._everyone)):
                self._broken = ""
                return
        raise RuntimeError(f"{self._broken}: the engines were lost {1 + _MOST_REPEATS} times")

    def _take(self, stream: _Stream) -> Exception | None:
        """Load this rank's engine, take this rank's part of the exchange to the end, and return the first error."""
        failure: Exception | None = None
        try:
            if self._local is not None:
                pairs = complete(stream, self._expected)
                self._local.load(pairs)
                for name, _ in pairs:
                    raise ValueError(f"the engine did not take {name}")
        except Exception as error:  # any error: the other ranks must not wait for this rank
            failure = error
        try:
            for _ in stream:
                pass
        except Exception as error:
            failure = failure or error
        return failure


class _Stream:
    """A stream of weights that remembers whether it raised an error itself."""

    def __init__(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        self._pairs, self.failed = pairs, False

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._pairs)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise


class _Collected(Future[Batch]):
    """A future whose first `result` or `exception` waits for the engines and exchanges the responses of all ranks."""

    def __init__(self, collect: Callable[[], Batch]) -> None:
        super().__init__()
        self._collect = collect

    def result(self, timeout: float | None = None) -> Batch:
        """Return the batch, or raise the error of an engine."""
        self.exception()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of an engine; None for responses."""
        if not self.done():
            try:
                self.set_result(self._collect())
            except Exception as error:
                self.set_exception(error)
        return super().exception()


def _seed(seed: int, number: int) -> int:
    """Return the seed of a prompt: a hash, so that neighbouring prompts have unrelated draws."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=7).digest(), "big")
