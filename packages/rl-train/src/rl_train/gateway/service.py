"""Services: an engine that draws for many callers, each of which asks when it likes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import Protocol

from parallel_models import SamplingOptions
from rl_train.engines.in_flight import Drawing, InFlightPool
from rl_train.engines.interface import Request, Response, WeightsLostError


class EngineService(Protocol):
    """Draws a response to each request; requests of all callers share decoding steps."""

    def submit(self, request: Request, sampling: SamplingOptions) -> Future[Response]:
        """Return a future of one response. `cancel` of the future ends the request.

        All requests have the same `sampling`, except for `max_length`.
        """
        ...


class PoolFuture(Future[Response]):
    """A future of one response by an `InFlightPool`.

    Attributes:
        request, sampling: The request.
        drawing: The request at an engine; None before it has begun.
    """

    def __init__(self, request: Request, sampling: SamplingOptions) -> None:
        super().__init__()
        self.request, self.sampling = request, sampling
        self.drawing: Drawing | None = None


class PoolService:
    """An `EngineService` of an `InFlightPool`: requests join the running batch of an engine between two looks.

    Weights may change meanwhile; each token has the version of the weights that drew it. The request of a lost engine
    is drawn by another engine. Without an engine that has weights, requests wait until `resume`, after a weight sync.
    """

    def __init__(self, pool: InFlightPool) -> None:
        self._pool, self._waiting = pool, list[PoolFuture]()
        self._changed = Condition()
        # Requests begin and end in one thread: an engine may answer before `begin` of the pool has returned.
        self._thread = ThreadPoolExecutor(1, "gateway")

    def submit(self, request: Request, sampling: SamplingOptions) -> PoolFuture:
        """See `EngineService`."""
        future = PoolFuture(request, sampling)
        self._run(self._begin, future)
        return future

    @property
    def lost(self) -> bool:
        """Say whether requests wait for a weight sync."""
        return bool(self._waiting)

    def wait(self, ended: Callable[[], bool]) -> bool:
        """Wait until requests wait for a weight sync (True), or `ended` returns True (False); see `notify`."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost or ended())
            return self.lost and not ended()

    def notify(self) -> None:
        """Have `wait` call `ended` again."""
        with self._changed:
            self._changed.notify_all()

    def resume(self) -> None:
        """Draw the requests that have waited for a weight sync."""
        self._thread.submit(self._resume).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            self._run(self._begin, future)

    def _run(self, step: Callable[[PoolFuture], None], future: PoolFuture) -> None:
        """Run a step of a request in the service's thread; its error is the future's."""

        def run() -> None:
            try:
                step(future)
            except WeightsLostError:
                self._waiting.append(future)
                self.notify()
            except BaseException as error:
                finish(future, error=error)

        self._thread.submit(run)

    def _begin(self, future: PoolFuture) -> None:
        if future.cancelled():
            return
        on_done = partial(self._run, self._look, future)
        future.drawing = self._pool.begin([future.request], future.sampling, on_done)
        future.add_done_callback(partial(self._ended, future.drawing))

    def _look(self, future: PoolFuture) -> None:
        """Take a response that is complete; the request of a lost engine goes to another one, or waits."""
        if future.done() or future.drawing is None or not future.drawing.done():
            return
        ((response,),) = future.drawing()
        finish(future, response)

    def _ended(self, drawing: Drawing, future: Future[Response]) -> None:
        """End the request of a future that its caller has cancelled."""
        if future.cancelled():
            self._thread.submit(drawing.cancel)


def finish(future: Future[Response], response: Response | None = None, error: BaseException | None = None) -> None:
    """Answer a future that its caller may have cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        assert response is not None
        future.set_result(response)
    else:
        future.set_exception(error)
