"""Conversations whose turns are drawn by engines in flight, while weights change and engines are lost."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_models import SamplingOptions
from rl_models import Actor
from rl_train.data.prompts import read_prompts
from rl_train.engines import Native, SeparateEngine
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.process import engine_process
from rl_train.environments.worker import Turn
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.environment_turns_in_flight import EnvironmentTurnsInFlight
from rl_train.options.options import TrainOptions
from rl_train.trajectories.episodes import totals

from ..engines.test_in_flight import InThread
from ..engines.test_separate import changed
from .test_environment_turns import TEMPLATE as TEMPLATE, run

SAMPLING = SamplingOptions(30, n=2, top_k=25, keep_sampling_mask=True, stop_ids=range(2, 9))


class Environments:
    """Environments whose answers to `step` come when the test gives them; `ends` are called at the end of the run."""

    def __init__(self) -> None:
        self.steps = SimpleQueue[tuple[int, Future[Turn]]]()
        self.ends = list[Callable[[], Any]]()

    def ask(self, sample: int, asks: str, value: Any = None, **flags: bool) -> Future[Turn]:
        future: Future[Turn] = Future()
        if asks == "step":
            self.steps.put((sample, future))
        else:
            future.set_result(Turn())
        return future


Talks = Callable[[Any, Any], tuple[Any, Any]]


@pytest.fixture
def talks(chat_model: Path, tmp_path: Path) -> Talks:
    """Conversations about two prompts with an engine."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": letter}) + "\n" for letter in "cd"))

    def make(engine: Any, environments: Any) -> tuple[Any, Any]:
        options = TrainOptions(model=chat_model, prompts=file, environment="talks:Talk", max_new_tokens=30)
        prompts = read_prompts(file, chat_model, 99)
        checked_run = CheckedRun(options, prompts, [], (), None)
        once = lambda make: pickle.loads(pickle.dumps(make()))  # noqa: E731
        rewards = SimpleNamespace(environments=environments, at_end=environments.ends.append)
        conversations: Any = EnvironmentTurnsInFlight(checked_run, engine, rewards, once, print)  # type: ignore[arg-type]
        return conversations, partial(conversations.draw, prompts)

    return make


@pytest.fixture(scope="module")
def actors(chat_model: Path) -> list[Actor]:
    return [Actor.from_pretrained(chat_model, device="cpu"), changed(chat_model)]


@pytest.fixture
def pool(chat_model: Path) -> Iterator[InFlightPool]:
    make = partial(Native, str(chat_model), device="cpu", max_sequences=8)
    pool = InFlightPool([engine_process("engine", InThread, (make,), 60.0, 60.0)])
    yield pool
    pool.close()


def test_turns_go_on_while_weights_change(talks: Talks, pool: InFlightPool, actors: list[Actor]) -> None:
    """The second turn of every conversation comes from newer weights, and the first prompt's goes on before."""
    environments = Environments()
    _, draw = talks(SimpleNamespace(pool=pool), environments)
    future = draw(SAMPLING)
    first = [environments.steps.get(timeout=60) for _ in range(4)]
    assert future.drawing.version() == 0
    pool.version = 5
    pool.load(actors[1].stream_weights())
    for number, answer in first:
        assert not future.drawing.done()
        answer.set_result(Turn([{"role": "user", "content": "ab"}], reward=1.0))
        same, second = environments.steps.get(timeout=60)
        assert same == number, "each conversation goes on by itself"
        second.set_result(Turn(reward=2.0))
    batch = future.result()
    assert future.drawing.done()
    assert future.drawing.version() == 0
    assert {name: sums.tolist() for name, sums in totals(batch).items() if name in ("turns", "environment_reward")} == {
        **{"turns": [2] * 4, "environment_reward": [3] * 4}
    }
    versions, drawn = batch["version"], batch.mask
    for row, mask in zip(versions.split(batch.lengths), batch.split("mask"), strict=True):
        ids, counts = row.unique_consecutive(return_counts=True)
        assert ids.tolist() == [-1, 0, -1, 5], "prompt, turn, what the environment said, turn"
        assert int(counts[2]) >= 2
        assert torch.equal(mask, row >= 0)
    for version, actor in ((0, actors[0]), (5, actors[1])):
        expected = actor.log_probs(batch).log_probs  # by the sampling masks of the batch
        at = versions == version
        torch.testing.assert_close(batch["log_probs"][at], expected[at], rtol=0, atol=1e-5)
    assert (batch["log_probs"][~drawn] == 0).all()
    assert batch.sampling_mask is not None
    assert batch.sampling_mask.check(batch.tokens, 10**6).tolist() == (~drawn).tolist()


def test_an_error_of_an_environment_ends_the_draw(talks: Talks, pool: InFlightPool) -> None:
    environments = Environments()
    _, draw = talks(SimpleNamespace(pool=pool), environments)
    future = draw(SAMPLING)
    environments.steps.get(timeout=60)[1].set_result(Turn(error="raised KeyError: 'gone'"))
    with pytest.raises(ValueError, match=r"rows.jsonl, line \d: the environment raised KeyError: 'gone'"):
        future.result()
    assert future.drawing.done()


def test_threads_end_with_the_run(talks: Talks, pool: InFlightPool, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where an environment answers later."""
    environments = Environments()
    begun = set(enumerate_threads())
    _, draw = talks(SimpleNamespace(pool=pool), environments)
    draw(SAMPLING)
    _, answer = environments.steps.get(timeout=60)
    threads = set(enumerate_threads()) - begun
    assert {thread.name.partition("_")[0] for thread in threads} >= {"episodes", "gateway"}
    for end in reversed(environments.ends):
        end()
    for thread in threads:
        if thread.name.startswith(("episodes", "gateway")):
            thread.join(30)
            assert not thread.is_alive()
    answer.set_result(Turn())
    assert "exception" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("when", ["turn", "environment"])
def test_conversations_of_a_lost_engine_go_on(chat_model: Path, talks: Talks, actors: list[Actor], when: str) -> None:
    """The only engine is lost in a turn, or while an environment answers: it gets the weights anew."""
    environments = Environments()
    engine = SeparateEngine(actors[1], chat_model, devices=[""], in_flight=True, max_length=63)
    try:
        engine.update_weights(actors[1], 4)
        _, draw = talks(engine, environments)
        kill = partial(os.kill, engine.pool.engines[0]._transport.pid, signal.SIGKILL)  # type: ignore[union-attr]
        if when == "turn":
            kill()
        future = draw(SAMPLING)
        answers = SimpleQueue[Any]()

        def answer() -> None:
            for _ in range(4):
                answers.put(environments.steps.get(timeout=60))
            if when == "environment":
                kill()
            for _ in range(4):
                answers.get()[1].set_result(Turn([{"role": "user", "content": "ab"}]))
                environments.steps.get(timeout=60)[1].set_result(Turn())

        thread = Thread(target=answer)
        thread.start()
        batch = future.result()
        thread.join()
        assert torch.equal(batch["version"], torch.where(batch.mask, 4, -1))
        assert totals(batch)["turns"].tolist() == [2] * 4
        expected = torch.where(batch.mask, actors[1].log_probs(batch).log_probs, 0)
        torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"dims": "dp=2", "rollouts.devices": "cpu,cpu"}], ids=str)
def test_a_run_learns_from_conversations_in_flight(
    chat_model: Path,
    tmp_path: Path,
    folder_of_rewards: Path,
    given: dict[str, Any],
) -> None:
    options = {"staleness": 1, "rollouts.devices": "cpu", "save-every": 1, "steps": 3, "eval-every": 3, **given}
    records = run(chat_model, tmp_path, "--in-flight", **options)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(1 < record["turns"] <= 3 and record["staleness"] <= 1 for record in records[1:])
    assert records[1]["rollout_difference"] < 1e-4
    assert records[-1]["eval/turns"] > 1
