"""`Apart`: engines in processes of their own, on devices of their own; a process that ends or hangs is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from rl_models.workers.generation import SamplingOptions
from rl_train.rollouts.handover import BUCKET_BYTES, Pairs, in_buckets, pack
from rl_train.rollouts.interface import LocalEngine, Request, Responses, WeightsLostError
from rl_train.rollouts.process import EngineLostError, EngineProcess


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
        tell: Callable[[str], None] = print,
    ) -> None:
        self._check, self._bucket_bytes, self._tell = check, bucket_bytes, tell
        self._engines = [
            EngineProcess(f"engine {number} (device {device or 'cpu'})", make, device, silence, timeout)
            for number, device in enumerate(devices)
        ]
        self._threads = ThreadPoolExecutor(len(self._engines), "rollouts")
        try:
            for engine in self._engines:
                engine.call("ready")
                engine.current = True
        except BaseException:
            self.close()
            raise

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the engines work in the background."""
        answers: dict[int, Any] = {}
        size = max(1, -(-len(requests) // (2 * len(self._engines))))
        queue: SimpleQueue[range] = SimpleQueue()
        for start in range(0, len(requests), size):
            queue.put(range(start, min(start + size, len(requests))))

        def work(engine: EngineProcess) -> None:
            """Answer requests until the queue is empty or the engine is lost."""
            while engine.current:
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

        working = self._threads.map(work, self._engines)

        def collect() -> Responses:
            list(working)
            # Engines that had found the queue empty answer what a lost engine has put back.
            while not queue.empty() and any(engine.current for engine in self._engines):
                list(self._threads.map(work, self._engines))
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
        receiving = self._engines
        for engine in receiving:
            engine.current = False
        try:
            for bucket in in_buckets(pairs, self._bucket_bytes):
                receiving = self._call(receiving, "load", pack(bucket, check=self._check))
            receiving = self._call(receiving, "load", None)
        except BaseException:
            # The engines wait for more; the error of the engine that has refused is raised.
            with suppress(Exception):
                self._call(receiving, "break off", None)
            raise
        for engine in receiving:
            engine.current = True
        if not receiving:
            raise WeightsLostError("every engine was lost during the hand-over")

    def sleep(self) -> None:
        """See `LocalEngine`."""
        self._call(self._engines, "sleep")

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._call(self._engines, "wake")

    def close(self) -> None:
        """See `LocalEngine`."""
        for engine in self._engines:
            engine.end()
        self._threads.shutdown(wait=False)

    def _call(self, engines: Sequence[EngineProcess], method: str, *args: Any) -> list[EngineProcess]:
        """Call a method of engines at once and wait for all; replace the engines that are lost, return the others."""
        calls = {engine: self._threads.submit(engine.call, method, *args) for engine in engines}
        errors = {engine: call.exception() for engine, call in calls.items()}
        for engine, error in errors.items():
            if isinstance(error, EngineLostError):
                self._replace(engine, error)
                del calls[engine]
        for call in calls.values():
            call.result()  # raises the error of an engine
        return list(calls)

    def _replace(self, engine: EngineProcess, loss: EngineLostError) -> None:
        self._tell(f"{loss}; it starts again, and its requests are repeated")
        engine.end()
        engine.start()
