"""Services: an engine that draws for many callers, each of which asks when it likes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import Any, Protocol

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


class PoolService:
    """An `EngineService` of an `InFlightPool`: requests join the running batch of an engine between two looks.

    Weights may change meanwhile; each token has the version of the weights that drew it. The request of a lost engine
    is drawn by another engine. Without an engine that has weights, requests wait until `resume`, after a weight sync.

    """

    def __init__(self, pool: InFlightPool) -> None:
        self._pool, self._waiting = pool, list[Callable[[], None]]()
        self._changed = Condition()
        # Requests begin and end in one thread: an engine may answer before `begin` of the pool has returned.
        self._thread = ThreadPoolExecutor(1, "gateway")

    def submit(self, request: Request, sampling: SamplingOptions) -> Future[Response]:
        """See `EngineService`."""
        future: Future[Response] = Future()
        self._run(future, self._begin, request, sampling)
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
        for begin in waiting:
            begin()

    def _run(self, future: Future[Response], step: Callable[..., None], *arguments: Any) -> None:
        """Run a step of a request in the service's thread; its error is the future's."""

        def run() -> None:
            try:
                step(future, *arguments)
            except BaseException as error:
                finish(future, error=error)

        self._thread.submit(run)

    def _begin(self, future: Future[Response], request: Request, sampling: SamplingOptions) -> None:
        if future.cancelled():
            return
        drawings = list[Drawing]()
        on_done = partial(self._run, future, self._look, drawings, request, sampling)
        try:
            drawings.append(self._pool.begin([request], sampling, on_done))
        except WeightsLostError:
            self._wait(future, request, sampling)
            return
        future.add_done_callback(partial(self._ended, drawings))

    def _look(
        self, future: Future[Response], drawings: list[Drawing], request: Request, sampling: SamplingOptions
    ) -> None:
        """Take a response that is complete; the request of a lost engine goes to another one, or waits."""
        if future.done() or not drawings[0].done():
            return
        try:
            ((response,),) = drawings[0]()
        except WeightsLostError:
            self._wait(future, request, sampling)
            return
        finish(future, response)

    def _ended(self, drawings: list[Drawing], future: Future[Response]) -> None:
        """End the request of a future that its caller has cancelled."""
        if future.cancelled():
            self._thread.submit(drawings[0].cancel)

    def _wait(self, future: Future[Response], request: Request, sampling: SamplingOptions) -> None:
        self._waiting.append(partial(self._run, future, self._begin, request, sampling))
        self.notify()


def finish(future: Future[Response], response: Response | None = None, error: BaseException | None = None) -> None:
    """Answer a future that its caller may have cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        assert response is not None
        future.set_result(response)
    else:
        future.set_exception(error)
