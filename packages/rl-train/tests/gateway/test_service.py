"""Requests of many callers that share the steps of an engine: draws, cancelled requests, and lost engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel_models import SamplingOptions
from rl_train.engines import Native
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.interface import Request, Response, Step
from rl_train.engines.process import engine_process
from rl_train.gateway.service import PoolService

from ..engines.test_in_flight import InThread

LENGTH = 24
SAMPLING = SamplingOptions(max_new_tokens=LENGTH)
REQUESTS = [Request([1, number, 3], seed=number) for number in range(2, 14)]


class Watched(Native):
    """Draws while `go` is set, and keeps the largest number of requests in flight."""

    go = threading.Event()
    most = 0
    cancelled = 0

    def cancel(self, key: int) -> None:
        Watched.cancelled += 1
        super().cancel(key)

    def step(self) -> Step:
        if not self.go.is_set():
            time.sleep(0.001)
            return Step([], [])
        step = super().step()
        assert self._stream is not None
        Watched.most = max(Watched.most, len(self._stream))
        return step


@pytest.fixture(scope="module")
def pool(model: Path) -> Iterator[InFlightPool]:
    make = partial(Watched, str(model), device="cpu", max_sequences=8, max_length=LENGTH + 3)
    pool = InFlightPool([engine_process("engine", InThread, (make,), 60.0, 60.0)], tell=lambda text: None)
    yield pool
    pool.close()


@pytest.fixture
def service(pool: InFlightPool) -> Iterator[PoolService]:
    Watched.go.set()
    service = PoolService(pool)
    yield service
    service.close()
    Watched.go.set()


def test_requests_share_steps_and_have_their_own_draws(pool: InFlightPool, service: PoolService) -> None:
    """Each response is that of its seed, drawn alone, whatever else is drawn beside it."""
    alone = [response for ((response,),) in (pool.begin([request], SAMPLING)() for request in REQUESTS[:3])]
    Watched.most = 0
    together = [service.submit(request, SAMPLING) for request in REQUESTS]
    for one, future in zip(alone, together, strict=False):
        response = future.result(60)
        assert response.tokens == one.tokens
        assert response.log_probs == pytest.approx(one.log_probs, abs=1e-5)
    assert Watched.most > 4


def test_a_cancelled_request_ends(pool: InFlightPool, service: PoolService) -> None:
    """Before it is drawn, while it waits for a row, and while it is drawn; the others go on as if it had not been."""
    Watched.go.clear()
    futures = [service.submit(request, SAMPLING) for request in REQUESTS]
    assert futures[1].cancel()
    service._thread.submit(lambda: None).result()
    assert futures[3].cancel()
    _wait(lambda: Watched.cancelled > 0)
    Watched.go.set()
    service.submit(REQUESTS[0], SAMPLING).result(60)  # by now the first rows have drawn some tokens
    for number in range(4, len(futures)):
        futures[number].cancel()
    expected = [response for ((response,),) in (pool.begin([request], SAMPLING)() for request in REQUESTS[:3:2])]
    assert [futures[0].result(60).tokens, futures[2].result(60).tokens] == [one.tokens for one in expected]
    _wait(lambda: not pool.engines[0]._calls and not any(pool._open.values()))
    assert not [drawing for drawing in pool.drawings if not drawing.done()]


def test_an_error_of_a_request_is_its_own(service: PoolService) -> None:
    wrong = service.submit(Request([1] * 500, 1), SamplingOptions(max_new_tokens=LENGTH, max_length=100))
    with pytest.raises(ValueError, match="leaves no token"):
        wrong.result(60)
    assert len(service.submit(REQUESTS[0], SAMPLING).result(60).tokens) <= LENGTH


class Lossy:
    """A pool whose engine is lost until `weights`."""

    def __init__(self) -> None:
        self.weights = False

    def begin(self, requests: Any, sampling: Any, on_done: Any) -> Any:
        from rl_train.engines.interface import WeightsLostError

        if not self.weights:
            raise WeightsLostError("no engine")
        return Answered(on_done)


class Answered:
    def __init__(self, on_done: Any) -> None:
        on_done()

    def done(self) -> bool:
        return True

    def __call__(self) -> Any:
        return [[Response([5], [-1.0])]]

    def cancel(self) -> None: ...


def test_requests_wait_for_weights() -> None:
    """Without an engine that has weights they wait until `resume`; a cancelled one is not drawn."""
    pool: Any = Lossy()
    service = PoolService(pool)
    futures: list[Future[Response]] = [service.submit(request, SAMPLING) for request in REQUESTS[:3]]
    assert service.wait(lambda: False)
    futures[1].cancel()
    pool.weights = True
    service.resume()
    assert [futures[number].result(10).tokens for number in (0, 2)] == [[5], [5]]
    assert futures[1].cancelled()
    assert not service.lost
    service.close()


def _wait(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happens()
