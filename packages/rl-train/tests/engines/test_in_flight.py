"""Engines that take requests and weights while they draw, in threads and in processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from parallel_layers import ParallelDims
from parallel_models import SamplingOptions
from parallel_models.generation import STEPS
from rl_models import Actor, Batch
from rl_train.cli.commands import app
from rl_train.engines import Native, SeparateEngine, processes
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.interface import Request, Response, Step, WeightsLostError
from rl_train.engines.native_ranks import NativeRanks
from rl_train.engines.process import EngineServer, engine_process
from rl_train.processes.worker import Calls

from ..loop.test_train import arguments, lines
from .stub import Stub
from .test_separate import changed

LENGTH = 60  # with the prompt below the model's 64 positions
SAMPLING = SamplingOptions(max_new_tokens=LENGTH, n=2)
SHORT = SamplingOptions(max_new_tokens=20, n=2)
REQUESTS = [Request([1, number, 3], seed=number) for number in range(2, 8)]


class InThread:
    """An engine server in a thread: a `Transport` to it, and its pipe."""

    place = ""

    def __init__(self) -> None:
        self.calls, self.answers = SimpleQueue[Any](), SimpleQueue[Any]()
        self.server = EngineServer(Calls(self.Pipe(self)))
        threading.Thread(target=self.server.serve, daemon=True).start()

    def send(self, message: Any) -> None:
        self.calls.put(message)

    def receive(self, limit: float) -> Any:
        try:
            return self.answers.get(timeout=limit)
        except Empty:
            raise TimeoutError from None

    def status(self) -> str:
        return ""

    def end(self) -> None:
        self.calls.put(None)

    class Pipe:
        def __init__(self, transport: InThread) -> None:
            self.transport = transport
            self.send = transport.answers.put

        def poll(self) -> bool:
            return not self.transport.calls.empty()

        def recv(self) -> Any:
            if (message := self.transport.calls.get()) is None:
                raise EOFError
            return message


class Holding(Native):
    """Draws for one look with the first weights, once three requests are there, and then with the next weights."""

    held = threading.Event()

    def step(self) -> Any:
        if self._version == 0 and (self.held.is_set() or len(self._waiting) < 3):
            time.sleep(0.001)
            return Step([], [])
        complete = super().step()
        self.held.set()
        return complete


class Slow(Native):
    """Draws slowly, so that a test acts meanwhile; `mark` says at which method it ends its process."""

    def __init__(self, model: str, mark: Path | None = None) -> None:
        super().__init__(model, device="cpu", max_sequences=8, max_length=LENGTH + 3)
        self.mark = mark

    def step(self) -> Any:
        time.sleep(0.2)
        self._end("step")
        return super().step()

    def load(self, named_tensors: Any) -> None:
        def interrupted() -> Iterator[Any]:
            for number, entry in enumerate(named_tensors):
                if number == 3:
                    self._end("load")
                yield entry

        super().load(interrupted())
        self._end("loaded")

    def _end(self, method: str) -> None:
        with suppress(FileNotFoundError):  # the first engine takes the mark
            if self.mark is not None and self.mark.read_text() == method:
                self.mark.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def actors(model: Path) -> list[Actor]:
    return [Actor.from_pretrained(model, device="cpu"), changed(model)]


def test_an_engine_that_draws_takes_requests_and_weights(model: Path, actors: list[Actor]) -> None:
    """Each token's log-prob is that of the version that the token names, or with old keys near it."""
    make = partial(Holding, str(model), device="cpu", max_sequences=8)
    pool = InFlightPool([engine_process("engine", InThread, (make,), 60.0, 60.0)])
    try:
        long = pool.begin(REQUESTS[:1], SAMPLING)
        short = pool.begin(REQUESTS[1:3], SAMPLING)
        Holding.held.wait(60)
        pool.version = 7
        pool.load(actors[1].stream_weights())
        assert not long.done()
        assert long.version() == 0
        other = pool.begin(REQUESTS[3:], SHORT)  # other options wait for the responses in flight
        assert other.version() is None
        answers = [*long(), *short()]
        versions = [response.versions or [] for answer in answers for response in answer]
        assert all(row == sorted(row) and set(row) == {0, 7} and len(row) == LENGTH for row in versions)
        assert [len(answer) for answer in other()] == [2, 2, 2]
        assert all(response.versions == [7] * len(response.tokens) for answer in other() for response in answer)
        for request, answer in zip(REQUESTS, answers, strict=False):
            for response in answer:
                batch = Batch.from_sequences([request.prompt + response.tokens])
                old, new = (actor.log_probs(batch).log_probs[3:] for actor in actors)
                drawn, version = torch.tensor(response.log_probs), torch.tensor(response.versions)
                torch.testing.assert_close(drawn[version == 0], old[version == 0], rtol=0, atol=1e-5)
                assert float((old - new).abs()[version == 7].mean()) > 0.1
                assert float((drawn - new).abs()[version == 7].mean()) < float((old - new).abs()[version == 7].mean())
    finally:
        pool.close()


class Paced(Native):
    """Takes a step for each permit."""

    permits = threading.Semaphore(0)

    def step(self) -> Step:
        return super().step() if self.permits.acquire(timeout=0.001) else Step([], [])


def failing(weights: Any) -> Iterator[Any]:
    yield from islice(weights, 4)
    raise OSError("the disk is gone")


def test_nothing_is_drawn_between_a_weight_sync_that_fails_and_one_that_succeeds(
    model: Path, actors: list[Actor]
) -> None:
    """The engine has some of the new weights meanwhile, and its response in flight goes on with all of them."""
    make = partial(Paced, str(model), device="cpu", max_sequences=8)
    pool = InFlightPool([engine_process("engine", InThread, (make,), 60.0, 60.0)])
    try:
        drawing = pool.begin(REQUESTS[:1], SAMPLING)
        Paced.permits.release()
        while drawing.version() is None:
            time.sleep(0.001)
        pool.version = 1
        with pytest.raises(OSError, match="the disk is gone"):
            pool.load(failing(actors[0].stream_weights()))
        Paced.permits.release(9)
        time.sleep(0.05)
        with pytest.raises(WeightsLostError, match="no engine with weights is left"):
            pool.begin(REQUESTS[1:2], SAMPLING)
        pool.version = 2
        pool.load(actors[1].stream_weights())
        ((first, second),) = drawing()
        assert first.versions == second.versions == [0] * STEPS + [2] * (LENGTH - STEPS)
    finally:
        pool.close()


def test_after_an_error_of_the_model_no_key_is_left(model: Path, actors: list[Actor]) -> None:
    """Also of requests that wait for others; the engine goes on with the next weights."""
    make = partial(Native, str(model), device="cpu", max_sequences=8)
    pool = InFlightPool([engine_process("engine", InThread, (make,), 60.0, 60.0)])
    try:
        pool.load((name, torch.full_like(tensor, torch.nan)) for name, tensor in actors[0].stream_weights())
        with pool.lock:
            drawings = [pool.begin([request], sampling) for request in REQUESTS[:2] for sampling in (SAMPLING, SHORT)]
        for drawing in drawings:
            with pytest.raises(ValueError, match="the model gives NaN or infinite logits after 1 tokens"):
                drawing()
        assert pool.engines[0]._transport.server._draws == {}, "it takes no further steps"  # type: ignore[union-attr]
        pool.load(actors[0].stream_weights())
        for sampling in (SHORT, SAMPLING):
            ((response, _),) = pool.begin(REQUESTS[:1], sampling)()
            assert len(response.tokens) == sampling.max_new_tokens
    finally:
        pool.close()


def test_keys_that_are_given_up_are_not_answered(model: Path) -> None:
    engine, complete = Native(model, device="cpu", max_sequences=8), dict[int, Any]()
    engine.add(1, REQUESTS[0], SAMPLING)
    assert engine.step() == ([(1, 0)], [])
    engine.add(2, REQUESTS[1], SHORT)  # waits: it has other options
    engine.add(3, REQUESTS[2], SHORT)
    assert engine.step() == ([], [])
    for key in (1, 2, 9):
        engine.cancel(key)
    assert engine.step().begun == [(3, 0)]
    while not complete:
        complete |= dict(engine.step().complete)
    assert complete.keys() == {3}
    engine.cancel(3)
    engine.close()


class Endless(Stub):
    """Draws nothing, and tells of the begin of a request after its end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = list[Any]()

    def add(self, key: Any, request: Request, sampling: SamplingOptions) -> None:
        self.key = key

    def step(self) -> Step:
        time.sleep(0.001)
        return Step([(key, 0) for key in self.ended], [])

    def cancel(self, key: Any) -> None:
        assert key == self.key
        self.ended.append(key)

    def expect(self, version: int) -> None:
        pass


class Choosy(Endless):
    """Answers the requests of an even seed alone."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = list[Any]()

    def add(self, key: Any, request: Request, sampling: SamplingOptions) -> None:
        self.keys += [key] * (request.seed % 2 == 0)

    def step(self) -> Step:
        time.sleep(0.001)
        answered, self.keys = self.keys, []
        return Step([(key, 0) for key in answered], [(key, [Response([7], [0.0])]) for key in answered])

    def cancel(self, key: Any) -> None:
        pass


def test_a_request_goes_to_the_idlest_engine_and_a_turn_to_that_of_its_conversation() -> None:
    pool = InFlightPool([engine_process(f"engine {n}", InThread, (Choosy,), 60.0, 60.0) for n in range(2)])
    unanswered = 0

    def engine_of(prompt: list[int], seed: int) -> int:
        nonlocal unanswered
        drawing, unanswered = pool.begin([Request(prompt, seed)], SamplingOptions(1)), unanswered + seed % 2
        if seed % 2 == 0:
            drawing()
        deadline = time.monotonic() + 5  # the pool counts an answer in another thread
        while sum(pool._open.values()) > unanswered and time.monotonic() < deadline:
            time.sleep(0.001)
        return drawing.draws[0].engine

    try:
        assert engine_of([1], 1) == 0, "which is never answered"
        conversation = [2] * 70
        assert [engine_of(conversation, 2), engine_of([3], 4), engine_of([4], 1)] == [1, 1, 1]
        assert engine_of([5], 1) == 0
        assert engine_of([6], 2) == 1
        assert engine_of([7], 1) == 1
        assert engine_of([*conversation, 7, 8], 1) == 1, "its keys and values are there, and as many open responses"
        assert engine_of([8], 1) == 0
    finally:
        pool.close()


class OnRay(InThread):
    """A transport whose calls get the numbers of `RayHost`, which begin with the caller."""

    def send(self, message: Any) -> None:
        super().send((("caller", message[0]), *message[1:]))

    def receive(self, limit: float) -> Any:
        (_, number), *answer = super().receive(limit)
        return number, *answer


@pytest.mark.parametrize("transport", [InThread, OnRay])
def test_a_request_that_is_given_up_ends(transport: type[InThread]) -> None:
    pool = InFlightPool([engine_process("engine", transport, (Endless,), 60.0, 60.0)])
    try:
        for _ in range(2):
            drawing = pool.begin(REQUESTS[:1], SHORT)
            time.sleep(0.01)
            drawing.cancel()
            assert drawing.draws[0].call.result(10) == []
    finally:
        pool.close()


class Mortal(InThread):
    """A transport whose engine ends when a test says so."""

    ends = threading.Event()

    def receive(self, limit: float) -> Any:
        if self.ends.is_set():
            self.ends.clear()
            raise EOFError
        return super().receive(min(limit, 0.01))


@pytest.mark.parametrize("by", ["done", "load"])
def test_the_requests_of_a_lost_engine_begin_again_at_a_look_and_behind_new_weights(by: str) -> None:
    """Behind new weights at once: nobody may look until the step has been learned."""
    pool = InFlightPool([engine_process("engine", Mortal, (Endless,), 60.0, 60.0) for _ in range(2)])
    try:
        drawing = pool.begin(REQUESTS[:2], SHORT)
        before = [draw.call for draw in drawing.draws]
        Mortal.ends.set()
        while not any(call.done() for call in before):
            time.sleep(0.01)
        if by == "done":
            assert not drawing.done()
        else:
            with pytest.raises(WeightsLostError, match="engines were lost during the weight sync"):
                pool.load_by(lambda engines: None)
            pool.load_by(lambda engines: None)
        again = [draw.call for draw in drawing.draws]
        assert sum(call is not earlier for call, earlier in zip(again, before, strict=True)) == 1
        assert not any(call.done() for call in again)
        drawing.cancel()
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["step", "load", "loaded"])
def test_requests_of_a_lost_engine_are_repeated(model: Path, actors: list[Actor], tmp_path: Path, method: str) -> None:
    """It is lost before, in or after a weight sync; the other engine draws, and the lost one from the next sync on."""
    told, mark = list[str](), tmp_path / "mark"
    pool = InFlightPool(processes(partial(Slow, str(model), mark), [""] * 2, silence=20.0), tell=told.append)
    try:
        drawings = [pool.begin([request], SAMPLING) for request in REQUESTS]
        mark.write_text(method)
        for version in (1, 2):
            pool.version = version
            try:
                pool.load(actors[1].stream_weights())
            except WeightsLostError:
                pool.load(actors[1].stream_weights())
        for drawing in drawings:
            (answer,) = drawing()
            assert [len(response.tokens) for response in answer] == [LENGTH, LENGTH]
            assert all(response.versions == sorted(response.versions or []) for response in answer)
        assert len(told) == 1
        assert pool.current == {0, 1} if method == "load" else pool.current >= {0} or pool.current >= {1}
    finally:
        pool.close()


@pytest.mark.slow
def test_without_an_engine_the_weights_and_the_request_are_repeated(model: Path) -> None:
    actor = changed(model)
    engine = SeparateEngine(actor, model, devices=[""], in_flight=True, max_length=LENGTH + 3)
    pool = engine._local
    assert isinstance(pool, InFlightPool)
    try:
        engine.update_weights(actor, 4)
        future, other = (engine.generate_async([[1, 2, last]], SAMPLING) for last in (3, 4))
        os.kill(pool.engines[0]._transport.pid, signal.SIGKILL)  # type: ignore[union-attr]
        batch = future.result()
        assert other.drawing.draws[0].call.exception(60) is None, "drawn beside the other one"  # type: ignore[attr-defined]
        assert torch.equal(batch["version"], torch.where(batch.mask, 4, -1))
        expected = torch.where(batch.mask, actor.log_probs(batch).log_probs, 0)
        torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
    finally:
        engine.close()


@pytest.mark.slow
def test_an_engine_over_two_devices_takes_weights_while_it_draws(model: Path, actors: list[Actor]) -> None:
    make = partial(NativeRanks, str(model), dims=ParallelDims(tp=2), seconds=60.0, max_sequences=8)
    pool = InFlightPool(processes(make, [""], silence=30.0))
    try:
        drawing = pool.begin(REQUESTS[:2], SAMPLING)
        pool.version = 3
        pool.load(actors[1].stream_weights())
        versions = [response.versions or [] for answer in drawing() for response in answer]
        assert all(row == sorted(row) and set(row) <= {0, 3} for row in versions)
        assert any(3 in row for row in versions)
    finally:
        pool.close()


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"rollouts.devices": "cpu,cpu", "rollouts.stale-cache": "recompute"}, marks=pytest.mark.slow),
        pytest.param({"dims": "dp=2", "algorithm": "dapo", "save-every": 1}, marks=pytest.mark.slow),
        pytest.param({"staleness": 3, "eval-prompts": None}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_learns_in_flight(model: Path, prompts: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    given = {"algorithm": "grpo", "steps": 4, "samples": 2, "rollouts.devices": "cpu", "staleness": 1, **options}
    given |= {"importance-cap": 2} | ({"eval-prompts": prompts, "eval-every": 2} if "eval-prompts" in options else {})
    command = [*arguments(model, prompts, tmp_path / "run", **given), "--in-flight", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    records = [record for record in lines(tmp_path / "run") if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    if "save-every" in options:  # go on from an earlier step, with the responses that were complete then
        latest = tmp_path / "run" / "training" / "actor" / "latest"
        latest.write_text(latest.read_text().replace("4", "3"))
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert [record["step"] for record in lines(tmp_path / "run") if "reward" in record] == [1, 2, 3, 4]
    for record in records:
        assert record["staleness"] <= int(given["staleness"])
        assert 0 <= record["staleness_min"] <= record["staleness_mean"] <= record["staleness"]
