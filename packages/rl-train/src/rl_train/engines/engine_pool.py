"""`Apart`: engines in other processes, on devices of their own; a process that ends or hangs is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from parallel_models import SamplingOptions
from rl_models.calls import divide
from rl_train.engines.interface import Request, Responses, WeightsLostError
from rl_train.engines.rpc import EngineLostError, RemoteEngine
from rl_train.weight_sync.buckets import BUCKET_BYTES, Pairs
from rl_train.weight_sync.sender import Losses, call_all, hand_over


class Apart:
    """A `LocalEngine`: a group of engines, each in a process of its own on a device of its own.

    Requests are divided into parts of about equal tokens, which wait in one queue: the next part goes to the engine
    that has nothing left to draw. An engine that ends or hangs is named, ended and started again in the background; its
    requests go back to the queue. It takes part again from the next hand-over on. If no engine is left,
    WeightsLostError asks to repeat the hand-over and the requests.

    Args:
        engines: The engines, such as `processes(make, devices)`; started here and ended by `close`.
        check: Compare a checksum of each tensor, before and after the transport.
        max_responses: The number of responses that an engine draws side by side; more go in several parts.
        bucket_bytes: The bytes of tensors that travel at a time.
        tell: Called with a text when an engine is lost.

    Raises:
        ValueError, RuntimeError: An engine does not start.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        *,
        check: bool = False,
        max_responses: int = 512,
        bucket_bytes: int = BUCKET_BYTES,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.engines, self._max_responses, self._tell = list(engines), max_responses, tell
        self._check, self._bucket_bytes = check, bucket_bytes
        # The number of hand-overs: a part is drawn with the weights that its requests began with, or not at all.
        self._hand_overs = 0
        # One thread for each engine: what waits for a busy engine keeps no other engine from its work.
        self._threads = [ThreadPoolExecutor(1, engine.name) for engine in self.engines]
        try:
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                engine.call("ready")
                engine.current = True
        except BaseException:
            self.close()
            raise

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the engines work in the background."""
        answers: dict[int, Any] = {}
        begun = self._hand_overs
        queue: SimpleQueue[list[int]] = SimpleQueue()
        for part in self._parts(requests, sampling):
            queue.put(part)

        def work(engine: RemoteEngine) -> None:
            """Answer requests until the queue is empty or the engine is lost."""
            while engine.current and self._hand_overs == begun:
                try:
                    part = queue.get_nowait()
                except Empty:
                    return
                try:
                    found = engine.call("generate", [requests[number] for number in part], sampling)
                except EngineLostError as loss:
                    queue.put(part)
                    self._replace(engine, loss)
                else:
                    answers.update(zip(part, found, strict=True))

        def start() -> list[Any]:
            return [thread.submit(work, engine) for thread, engine in zip(self._threads, self.engines, strict=True)]

        working = start()

        def collect() -> Responses:
            nonlocal working
            while True:
                for one in working:
                    one.result()
                if queue.empty():
                    return [answers[number] for number in range(len(requests))]
                if self._hand_overs != begun or not any(engine.current for engine in self.engines):
                    raise WeightsLostError("no engine with the weights of these requests is left")
                # Engines that had found the queue empty answer what a lost engine has put back.
                working = start()

        return collect

    def load(self, pairs: Pairs) -> None:
        """See `LocalEngine`, and `load_by`."""
        self.load_by(lambda engines: hand_over(engines, pairs, check=self._check, bucket_bytes=self._bucket_bytes))

    def load_by(self, send: Callable[[Sequence[RemoteEngine]], Losses]) -> None:
        """Have a function send weights to the engines; it returns the engines that were lost, by number.

        Raises:
            WeightsLostError: Every engine was lost; those that have started again need another hand-over.
            Exception: The error of `send`; no engine generates until a hand-over succeeds.
        """
        self._hand_overs += 1
        for engine in self.engines:
            engine.current = False
        try:
            losses = send(self.engines)
        except BaseException:
            # The engines wait for more; the error of the engine that has refused is raised.
            with suppress(Exception):
                self._call("break off")
            raise
        for number, engine in enumerate(self.engines):
            engine.current = number not in losses
        self._replace_all(losses)
        if len(losses) == len(self.engines):
            raise WeightsLostError("every engine was lost during the hand-over")

    def sleep(self) -> None:
        """See `LocalEngine`."""
        self._call("sleep")

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._call("wake")

    def close(self) -> None:
        """See `LocalEngine`."""
        for engine in self.engines:
            engine.end()
        for thread in self._threads:
            thread.shutdown(wait=False)

    def _parts(self, requests: Sequence[Request], sampling: SamplingOptions) -> list[list[int]]:
        """Divide the numbers of the requests: a part for each engine, or a multiple if the responses are too many."""
        responses = len(requests) * sampling.n
        rounds = max(1, -(-responses // (self._max_responses * len(self.engines))))
        tokens = [len(request.prompt) + sampling.n * sampling.max_new_tokens for request in requests]
        return [part for part in divide(tokens, rounds * len(self.engines)) if part]

    def _call(self, method: str) -> None:
        self._replace_all(call_all({n: partial(e.call, method) for n, e in enumerate(self.engines)})[1])

    def _replace_all(self, losses: Losses) -> None:
        for number, loss in losses.items():
            self._replace(self.engines[number], loss)

    def _replace(self, engine: RemoteEngine, loss: EngineLostError) -> None:
        self._tell(f"{loss}; it starts again, and its requests are repeated")
        engine.end()
        engine.start()
