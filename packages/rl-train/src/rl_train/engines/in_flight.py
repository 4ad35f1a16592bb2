"""`InFlightPool`: engines that take requests and weights while they draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    complete. Weights change meanwhile. The requests of a lost engine are repeated by the others. All methods, and the
    `Drawing`s, are called from one thread.
    """

    def __init__(self, engines: Sequence[Process], **options: Any) -> None:
        # The number of losses of each engine, and what it draws.
        self._losses = Counter[int]()
        self.drawings = WeakSet[Drawing]()
        super().__init__(engines, **options)

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Drawing:
        """See `LocalEngine`."""
        drawing = Drawing(self)
        drawing.draws += (self.hand_out(request, sampling) for request in requests)
        return drawing

    def hand_out(self, request: Request, sampling: SamplingOptions) -> _Draw:
        """Give a request to an engine; WeightsLostError if none has weights."""
        counts = Counter[int]()
        for draw in (draw for drawing in self.drawings for draw in drawing.draws if not draw.call.done()):
            counts[draw.engine] += draw.sampling.n
        engine = min(self.current, key=lambda number: (counts[number], number), default=None)
        if engine is None:
            raise WeightsLostError("no engine with weights is left")
        versions = list[int]()
        call = self.engines[engine].submit("draw", request, sampling, on_part=versions.append)
        return _Draw(request, sampling, engine, self._losses[engine], call, versions)

    def repeated(self, draw: _Draw) -> _Draw:
        """Return a draw, or where its engine was lost the draw of another engine; WeightsLostError if none is left."""
        if not draw.call.done() or not isinstance(loss := draw.call.exception(), ProcessLost):
            return draw
        if draw.losses == self._losses[draw.engine]:
            self._replace(draw.engine, loss)
        return self.hand_out(draw.request, draw.sampling)

    def load_by(self, send: Callable[[Sequence[Process]], None]) -> None:
        """See `EnginePool`; the engines draw meanwhile, with the old weights or the new ones."""

        def send_with_version(engines: Sequence[Process]) -> None:
            wait_for_all([engine.submit("expect", self.version) for engine in engines])
            send(engines)

        super().load_by(send_with_version)
        for drawing in list(self.drawings):
            drawing.repeat_lost()

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

    def __init__(self, pool: InFlightPool) -> None:
        self._pool, self.draws = pool, list[_Draw]()
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
        return responses

    def repeat_lost(self) -> None:
        """Repeat the requests of lost engines; WeightsLostError if no engine is left."""
        for number, draw in enumerate(self.draws):
            self.draws[number] = self._pool.repeated(draw)
