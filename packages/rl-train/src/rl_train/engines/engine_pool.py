"""`EnginePool`: engines in other processes on separate devices; a process that ends or hangs is replaced."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from parallel_models import SamplingOptions
from parallel_models.generation import PrefixAffinity
from rl_models.calls import divide
from rl_train.engines.interface import Request, Responses, WeightsLostError
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Process
from rl_train.weight_sync.buckets import NamedTensors
from rl_train.weight_sync.sender import EnginesLost, WeightSender, wait_for_all

# An engine that is lost so often without an answer in between ends the run: what ends it will end it again.
_MOST_LOSSES = 3


class EnginePool:
    """A `LocalEngine`: a group of engines, each in a separate process on a separate device.

    Requests are divided into chunks of about equal tokens, which wait in one queue: the next chunk goes to an engine
    that is idle. A request that goes on with a sequence of an engine, such as the next turn of a conversation, goes to
    this engine. An engine that ends or hangs is named, ended and started again in the background; its requests go back
    to the queue. It draws again after the next weight sync. If no engine is left, WeightsLostError asks the caller to
    repeat the weight sync and the requests. An engine that is lost three times without an answer in between ends the
    run.

    Args:
        engines: The engines, such as `processes(make, devices)`; started here and ended by `close`.
        check: Compare a checksum of each tensor, before and after the transport.
        max_responses: The number of responses that an engine draws side by side; more go in several chunks.
        bucket_bytes: The size of a bucket (default: 256 MiB for weights on a GPU, 64 MiB on a CPU).
        tell: Called with a text when an engine is lost.

    Attributes:
        engines: The engines.
        current: The numbers of the engines that have the newest weights; a new process has none.
        version: The version of the weights that the next weight sync brings.

    Raises:
        Exception: An engine does not start.
    """

    def __init__(
        self,
        engines: Sequence[Process],
        *,
        check: bool = False,
        max_responses: int = 512,
        bucket_bytes: int | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.engines, self._max_responses, self._tell = list(engines), max_responses, tell
        self._sender = WeightSender(check, bucket_bytes)
        self.current, self.version = set(range(len(self.engines))), 0
        # The engines that were lost in the weight sync that is repeated now.
        self._left_out: set[int] = set()
        # The number of weight syncs: a chunk is drawn with the weights that its requests began with, or not at all.
        self._syncs, self._affinity = 0, PrefixAffinity()
        # The number of times that each engine was lost since its last answer.
        self.losses_in_a_row = Counter[int]()
        # One thread for each engine, so that a call that waits for a busy engine blocks no other engine.
        self._threads = [ThreadPoolExecutor(1, engine.name) for engine in self.engines]
        try:
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                engine.ready()
        except BaseException:
            self.close()
            raise

    @property
    def ways(self) -> list[str]:
        """Return how the last weight sync reached each engine: "in place", "nccl" or "gloo"."""
        return self._sender.ways

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the engines work in the background."""
        answers, drawn_by, begun = dict[int, Any](), dict[int, int](), self._syncs
        queue, chunks_of = self._queues(requests, sampling)

        def next_chunk(number: int) -> list[int] | None:
            """Return a chunk for an engine; None: nothing is left, or the engine is lost."""
            if number not in self.current or self._syncs != begun:
                return None
            with suppress(IndexError):
                return chunks_of[number].popleft()
            with suppress(IndexError):
                return queue.popleft()
            return None

        def work(number: int) -> None:
            """Answer requests until the queues are empty or the engine is lost."""
            while (chunk := next_chunk(number)) is not None:
                try:
                    asked = [requests[place] for place in chunk]
                    responses = self.engines[number].call("generate", asked, sampling)
                except ProcessLost as loss:
                    queue.append(chunk)
                    self._replace(number, loss)
                else:
                    self.losses_in_a_row[number] = 0
                    answers.update(zip(chunk, responses, strict=True))
                    drawn_by.update(dict.fromkeys(chunk, number))

        def start() -> list[Any]:
            for number in set(range(len(self.engines))) - self.current:
                queue.extend(chunks_of[number])
                chunks_of[number].clear()
            return [thread.submit(work, number) for number, thread in enumerate(self._threads)]

        working = start()

        def collect() -> Responses:
            nonlocal working
            while True:
                for future in working:
                    future.result()
                if len(answers) == len(requests):
                    break
                if self._syncs != begun or not self.current:
                    raise WeightsLostError("no engine with the weights of these requests is left")
                # Requests of a lost engine are in the queue again; idle engines take them.
                working = start()
            if self._syncs == begun and len(self.engines) > 1:
                for place, number in drawn_by.items():
                    for response in answers[place]:
                        self._affinity.remember(requests[place].prompt + response.tokens, number)
            return [answers[place] for place in range(len(requests))]

        return collect

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`, and `load_by`."""
        self.load_by(lambda engines: self._sender.sync(engines, named_tensors))

    def load_by(self, send: Callable[[Sequence[Process]], None]) -> None:
        """Have a function send weights to engines.

        Raises:
            WeightsLostError: Engines were lost; the weight sync must be repeated, for the other engines if there are
                any, else for those that start again. Or the tensors differ from the last ones.
            Exception: The error of `send`; no engine generates until a weight sync succeeds.
        """
        self._syncs += 1
        self._affinity.forget()
        self.current = set()
        numbers = sorted(set(range(len(self.engines))) - self._left_out)
        left_out, self._left_out = self._left_out, set()
        try:
            send([self.engines[number] for number in numbers])
        except BaseException as error:
            losses = {numbers[i]: loss for i, loss in error.losses.items()} if isinstance(error, EnginesLost) else {}
            if not losses:
                raise
            self._replace_all(losses)
            left_out |= losses.keys()
            self._left_out = left_out if len(left_out) < len(self.engines) else set()
            raise WeightsLostError("engines were lost during the weight sync") from error
        self.current = set(numbers)

    def sleep(self) -> None:
        """See `LocalEngine`."""
        self._call("sleep")

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._call("wake")

    def close(self) -> None:
        """See `LocalEngine`."""
        self._sender.close()
        for engine in self.engines:
            engine.close()
        for thread in self._threads:
            thread.shutdown(wait=False)

    def _queues(
        self, requests: Sequence[Request], sampling: SamplingOptions
    ) -> tuple[deque[list[int]], list[deque[list[int]]]]:
        """Divide the numbers of the requests into chunks: those that any engine may draw, and those of each engine."""
        count, most = len(self.engines), max(1, self._max_responses // sampling.n)
        tokens = [len(request.prompt) + sampling.n * sampling.max_new_tokens for request in requests]
        parts = self._affinity.divide([request.prompt for request in requests], tokens, count)
        if parts is not None:
            return deque(), [deque(part[i : i + most] for i in range(0, len(part), most)) for part in parts]
        rounds = max(1, -(-len(requests) * sampling.n // (self._max_responses * count)))
        return deque(chunk for chunk in divide(tokens, rounds * count) if chunk), [deque() for _ in range(count)]

    def _call(self, method: str) -> None:
        try:
            wait_for_all([engine.submit(method) for engine in self.engines])
        except EnginesLost as error:
            self._replace_all(error.losses)

    def _replace_all(self, losses: dict[int, ProcessLost]) -> None:
        for number, loss in losses.items():
            self._replace(number, loss)

    def _replace(self, number: int, loss: ProcessLost) -> None:
        self.losses_in_a_row[number] += 1
        if self.losses_in_a_row[number] >= _MOST_LOSSES:
            raise ProcessLost(
                f"{loss}; it was lost {_MOST_LOSSES} times without an answer in between. Its log above has the reason"
            )
        self._tell(f"{loss}; it starts again, and its requests are repeated")
        self.current.discard(number)
        self.engines[number].restart()
