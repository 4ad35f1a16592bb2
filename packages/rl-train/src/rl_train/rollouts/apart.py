"""`Apart`: engines in processes of their own, on devices of their own; a process that ends or hangs is replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from rl_models.workers.generation import SamplingOptions
from rl_train.rollouts.handover import BUCKET_BYTES, Pairs, checksum, in_buckets
from rl_train.rollouts.local import LocalEngine, Request, Responses, WeightsLostError
from rl_train.rollouts.process import EngineLostError, EngineProcess, HostMemory


class Apart:
    """A `LocalEngine`: a group of engines, each in a process of its own on a device of its own.

    Requests wait in one queue, from which each engine takes some whenever it is free. An engine that ends or hangs is
    named, ended and started again in the background; its requests go back to the queue. It takes part again from the
    next hand-over on. If no engine is left, WeightsLostError asks for the hand-over and the requests anew.

    Args:
        make: Makes the engine in its process; pickled, so a function of a module or a `partial` of it.
        devices: `CUDA_VISIBLE_DEVICES` of each engine; one process each.
        check: Compare a checksum of each tensor, before and after the transport.
        silence: The seconds without a sign of life after which a process hangs.
        timeout: The seconds after which a call has taken too long, the start of an engine included.
        bucket_bytes: The bytes of tensors that travel at a time.
        transport: How a bucket travels.
        tell: Called with a text when an engine is lost.

    Raises:
        ValueError, RuntimeError: An engine does not start.
    """

    def __init__(
        self,
        make: Callable[[], LocalEngine],
        devices: Sequence[str],
        *,
        check: bool = False,
        silence: float = 60.0,
        timeout: float = 1800.0,
        bucket_bytes: int = BUCKET_BYTES,
        transport: HostMemory | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._check, self._bucket_bytes, self._tell = check, bucket_bytes, tell
        self._transport = transport or HostMemory()
        self._engines = [
            EngineProcess(
                f"engine {number} (device {device or 'cpu'})", make, device, self._transport, silence, timeout
            )
            for number, device in enumerate(devices)
        ]
        self._threads = ThreadPoolExecutor(len(self._engines), "rollouts")
        try:
            self._each(lambda engine: engine.call("ready"))
        except BaseException:
            self.close()
            raise
        self._current = set(self._engines)

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the engines work in the background."""
        answers: dict[int, Any] = {}
        size = max(1, -(-len(requests) // (2 * len(self._engines))))
        queue: SimpleQueue[range] = SimpleQueue()
        for start in range(0, len(requests), size):
            queue.put(range(start, min(start + size, len(requests))))

        def work(engine: EngineProcess) -> None:
            """Answer requests until the queue is empty or the engine is lost."""
            while engine in self._current:
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

        futures = [self._threads.submit(work, engine) for engine in self._engines]

        def collect() -> Responses:
            for future in futures:
                future.result()
            # Engines that had found the queue empty answer what a lost engine has put back.
            while not queue.empty() and self._current:
                self._each(work)
            if not queue.empty():
                raise WeightsLostError("no engine with the weights of these requests is left")
            return [answers[number] for number in range(len(requests))]

        return collect

    def load(self, pairs: Pairs) -> None:
        """See `LocalEngine`; each bucket goes to all engines before the next bucket is made.

        Raises:
            WeightsLostError: Every engine was lost; those that have started again need another hand-over.
            Exception: The error of an engine that refused the weights.
        """
        self._current = set()
        receiving = self._tried(self._engines, lambda engine: engine.call("load"))
        whole = False
        try:
            for bucket in in_buckets(pairs, self._bucket_bytes):
                sums = [checksum(tensor) for _, tensor in bucket] if self._check else None
                receiving = self._send(receiving, self._transport.pack(bucket), sums)
            whole = True
        finally:
            # Engines must not keep half of the weights: they refuse to generate until a hand-over ends.
            receiving = self._tried(receiving, lambda engine: engine.call("end", whole))
        if not receiving:
            raise WeightsLostError("every engine was lost during the hand-over")
        self._current = set(receiving)

    def _send(self, engines: Sequence[EngineProcess], message: Any, sums: list[int] | None) -> list[EngineProcess]:
        return self._tried(engines, lambda engine: engine.call("bucket", message, sums))

    def sleep(self) -> None:
        """See `LocalEngine`."""
        self._tried(self._engines, lambda engine: engine.call("sleep"))

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._tried(self._engines, lambda engine: engine.call("wake"))

    def close(self) -> None:
        """See `LocalEngine`."""
        for engine in self._engines:
            engine.end()
        self._threads.shutdown(wait=False)

    def _each(self, function: Callable[[EngineProcess], Any]) -> list[Any]:
        return list(self._threads.map(function, self._engines))

    def _tried(self, engines: Sequence[EngineProcess], function: Callable[[EngineProcess], Any]) -> list[EngineProcess]:
        """Call a function with all engines at once; replace the engines that are lost and return the others."""

        def living(engine: EngineProcess) -> bool:
            try:
                function(engine)
            except EngineLostError as loss:
                self._replace(engine, loss)
                return False
            return True

        lived = list(self._threads.map(living, engines))
        return list(itertools.compress(engines, lived))

    def _replace(self, engine: EngineProcess, loss: EngineLostError) -> None:
        self._current.discard(engine)
        self._tell(f"{loss}; it starts again, and its requests are repeated")
        engine.start()
