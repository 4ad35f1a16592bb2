"""`InFlightPool`: engines that take requests and weights while they draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock, RLock
from typing import Any, NamedTuple
from weakref import WeakSet

from parallel_models import SamplingOptions
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.interface import Request, Response, Responses, WeightsLostError
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Call, Process
from rl_train.weight_sync.sender import wait_for_all


class InFlightPool(EnginePool):
    """An `EnginePool` of `StreamingEngine`s.

    Each request goes at once to the engine with the fewest open responses, and is answered when its responses are
    complete. Weights change meanwhile. The requests of a lost engine are repeated by the others. Threads may begin
    requests while another one waits for responses or loads weights.

    Attributes:
        lock: Held while requests and weights go to engines.
    """

    def __init__(self, engines: Sequence[Process], **options: Any) -> None:
        # The number of losses of each engine, of its open responses, and what the pool draws.
        self._losses, self._open = Counter[int](), Counter[int]()
        self.drawings = WeakSet[Drawing]()
        self._counting = Lock()
        self.lock, self._closed = RLock(), False
        super().__init__(engines, **options)

    def begin(
        self, requests: Sequence[Request], sampling: SamplingOptions, on_done: Callable[[], Any] = lambda: None
    ) -> Drawing:
        """See `LocalEngine`; `on_done` is called in another thread when a request is answered or its engine is lost."""
        with self.lock:
            drawing = Drawing(self, on_done)
            drawing.draws += (self.hand_out(request, sampling, on_done) for request in requests)
        return drawing

    def hand_out(self, request: Request, sampling: SamplingOptions, on_done: Callable[[], Any]) -> _Draw:
        """Give a request to an engine; WeightsLostError if none has weights."""
        begun = self._affinity.engine(request.prompt)
        engines = self.current & {begun} or self.current
        engine = min(engines, key=lambda number: (self._open[number], number), default=None)
        if engine is None:
            raise WeightsLostError("no engine with weights is left")
        versions = list[int]()
        self._count(engine, sampling.n)
        call = self.engines[engine].submit("draw", request, sampling, on_part=versions.append)

        def end(call: Future[Any]) -> None:
            self._count(engine, -sampling.n)
            if call.exception() is None:
                self.losses_in_a_row[engine] = 0
            on_done()

        call.add_done_callback(end)
        return _Draw(request, sampling, engine, self._losses[engine], call, versions)

    def _count(self, engine: int, responses: int) -> None:
        """Add to the open responses of an engine; answers come in other threads, also while `lock` is held."""
        with self._counting:
            self._open[engine] += responses

    def repeated(self, draw: _Draw, on_done: Callable[[], Any]) -> _Draw:
        """Return a draw, or where its engine was lost the draw of another engine; WeightsLostError if none is left."""
        if self._closed or not draw.call.done() or not isinstance(loss := draw.call.exception(), ProcessLost):
            return draw
        if draw.losses == self._losses[draw.engine]:
            self._replace(draw.engine, loss)
        return self.hand_out(draw.request, draw.sampling, on_done)

    def remember(self, draws: Sequence[_Draw], responses: Responses) -> None:
        """Remember which engine has the keys and values of responses; their next turns go there."""
        with self.lock:
            for draw, answer in zip(draws, responses, strict=True):
                for response in answer if len(self.engines) > 1 else ():
                    self._affinity.remember(draw.request.prompt + response.tokens, draw.engine)

    def load_by(self, send: Callable[[Sequence[Process]], None]) -> None:
        """See `EnginePool`; the engines draw meanwhile, with the old weights or the new ones."""

        def send_with_version(engines: Sequence[Process]) -> None:
            wait_for_all([engine.submit("expect", self.version) for engine in engines])
            send(engines)

        with self.lock:
            super().load_by(send_with_version)
            for drawing in list(self.drawings):
                drawing.repeat_lost()

    def close(self) -> None:
        """See `LocalEngine`."""
        self._closed = True
        super().close()

    def _replace(self, number: int, loss: ProcessLost) -> None:
        self._losses[number] += 1
        super()._replace(number, loss)


class _Draw(NamedTuple):
    """A request at an engine, which had been lost `losses` times before; `versions` has the first token's version."""

    request: Request
    sampling: SamplingOptions
    engine: int
    losses: int
    call: Call
    versions: list[int]


class Drawing:
    """The responses to some requests; a call of the object waits for them."""

    def __init__(self, pool: InFlightPool, on_done: Callable[[], Any]) -> None:
        self._pool, self._on_done, self.draws = pool, on_done, list[_Draw]()
        pool.drawings.add(self)

    def done(self) -> bool:
        """Say whether a call of the object returns, or raises, at once."""
        try:
            self.repeat_lost()
        except WeightsLostError:
            return True
        return all(draw.call.done() for draw in self.draws)

    def version(self) -> int | None:
        """Return the oldest version of the weights that draws the responses; None before the first token."""
        return min((version for draw in self.draws for version in draw.versions), default=None)

    def __call__(self) -> Responses:
        """Return the responses; see `LocalEngine.begin`."""
        while not self.done():
            for draw in self.draws:
                draw.call.exception()
        self.repeat_lost()
        responses: list[list[Response]] = [draw.call.result() for draw in self.draws]
        self._pool.remember(self.draws, responses)
        return responses

    def cancel(self) -> None:
        """End the requests; a call of the object is not possible any more."""
        with self._pool.lock:
            self._pool.drawings.discard(self)
            for draw in self.draws:
                if not draw.call.done():
                    self._pool.engines[draw.engine].submit("cancel", draw.call.number)

    def repeat_lost(self) -> None:
        """Repeat the requests of lost engines; WeightsLostError if no engine is left."""
        with self._pool.lock:
            for number, draw in enumerate(self.draws):
                self.draws[number] = self._pool.repeated(draw, self._on_done)
