"""The bookkeeping of draws while weights change, with an engine that answers at chosen looks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.mixture import Mixture
from rl_train.data.prompts import Prompt
from rl_train.loop import draws as draws_module
from rl_train.loop.draws import Draw, Draws, DrawsInFlight, State, done

SAMPLES = 2


class Arriving(Future[Batch]):
    """Responses of one token for each version from that at look `begins` to that at look `ends`.

    As those of engines the future is done when the ranks have exchanged the responses, by `result`.
    """

    def __init__(self, engine: SimpleNamespace, prompt: Prompt, begins: int, ends: int) -> None:
        super().__init__()
        self.engine, self.prompt, self.begins, self.ends = engine, prompt, begins, ends
        self.begun: int | None = None
        self.drawn: Batch | None = None
        self.drawing = SimpleNamespace(done=self.look, version=lambda: self.begun)

    def look(self) -> bool:
        self.begins, self.ends = self.begins - 1, self.ends - 1
        if self.begun is None and (self.begins < 0 or self.ends < 0):
            self.begun = self.engine.version
        if self.ends < 0 and self.drawn is None:
            versions = list(range(self.begun or 0, self.engine.version + 1))
            row, length = [self.prompt.tokens[0], *versions], len(versions)
            fields = {"log_probs": [[0.0] * len(row)] * SAMPLES, "version": [[-1, *versions]] * SAMPLES}
            self.drawn = Batch.from_sequences([row] * SAMPLES, response_lengths=[length] * SAMPLES, **fields)
        return self.ends < 0

    def result(self, timeout: float | None = None) -> Batch:
        if self.drawn is None:
            pytest.fail("a step waits for responses that it may leave out")
        if not self.done():
            self.set_result(self.drawn)
        return super().result()


def run_of(prompts: int, prompts_per_step: int) -> Any:
    """Return a checked run of nine steps, with staleness 2."""
    options = SimpleNamespace(
        rollouts=SimpleNamespace(staleness=2), prompts_per_step=prompts_per_step, steps=9, seed=1, samples=1,
        prompts=Path(), sampling=SamplingOptions(1), data=SimpleNamespace(curriculum=None),
    )  # fmt: skip
    mixture = partial(Mixture.of_rows, [Prompt([number], {}, number) for number in range(prompts)], seed=1)
    return SimpleNamespace(options=options, stop_ids=(), mixture=mixture, changes=())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False), st.integers(0, 12), st.sampled_from([0, 5])
)
def test_in_flight_every_prompt_is_learned_once_and_in_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    staleness: int,
    prompts_per_step: int,
    chance: random.Random,
    slowest: int,
    kill_every: int,
) -> None:
    """Also where a step draws more, and after kills: unsaved responses are drawn again with newer weights."""
    monkeypatch.setattr(draws_module, "_LOOK_SECONDS", 0)
    steps, engine, asked = 7, SimpleNamespace(version=0), list[int]()
    prompts = [Prompt([number], {}, number) for number in range(200)]
    rollouts = SimpleNamespace(staleness=staleness)
    sampling = SamplingOptions(1)
    options: Any = SimpleNamespace(
        rollouts=rollouts, prompts_per_step=prompts_per_step, steps=steps, seed=1, samples=SAMPLES, prompts=Path(),
        sampling=sampling, data=SimpleNamespace(curriculum=None),
    )  # fmt: skip
    mixture = partial(Mixture.of_rows, prompts, seed=1)
    checked_run: Any = SimpleNamespace(options=options, stop_ids=(), mixture=mixture, changes=())

    def ask(of_draw: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        (prompt,) = of_draw
        asked.append(prompt.line)
        return Arriving(engine, prompt, chance.randint(0, slowest), chance.randint(0, slowest))

    def made() -> DrawsInFlight:
        return DrawsInFlight(checked_run, engine, ask, lambda function: function())  # type: ignore[arg-type]

    draws, learned = made(), list[int]()
    order = [prompt.line for _, prompt in Mixture.of_rows(prompts, seed=1).take(200)]
    for step in range(1, steps + 1):
        taken = [draws.take(step)]
        if more := chance.choice([0, 0, prompts_per_step]):
            taken.append(draws.more(more))
        for drawn in taken:
            lines = [prompt.line for prompt in drawn.prompts]
            assert lines == sorted(lines, key=order.index), "the oldest first"
            assert drawn.batch.tokens[drawn.batch.first].tolist() == [line for line in lines for _ in range(SAMPLES)]
            versions = drawn.batch["version"][drawn.batch.mask]
            assert step - 1 - staleness <= int(versions.min()) <= int(versions.max()) <= step - 1
            learned += lines
        draws.wait(step)
        for draw in draws.state.ahead:
            if draw.responses.done():
                versions = draw.responses.result()["version"]
                assert draw.version == int(versions[versions >= 0].min()), "of the first token, also after a kill"
        engine.version = step
        if kill_every and step % kill_every == 0:
            state = draws.state
            state.save(tmp_path, step, [step])
            draws = made()
            draws.resume(json.loads(json.dumps(state.to_json())), tmp_path, step)
    assert len(learned) == len(set(learned)), "every prompt once"
    # Prompts are left out of the last steps only while they are in flight.
    ahead = [draw.prompts[0].line for draw in draws.state.ahead]
    assert sorted(learned + ahead, key=order.index) == order[: draws.position]
    assert list(dict.fromkeys(asked)) == order[: draws.position], "asked for in order"


def test_of_two_old_draws_the_second_also_waits_for_a_step_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes one draw, so a later draw may go first only while both old ones have the time to follow."""
    monkeypatch.setattr(draws_module, "_LOOK_SECONDS", 0)
    engine: Any = SimpleNamespace(version=0)

    def ask(of_draw: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        (prompt,) = of_draw
        return Arriving(engine, prompt, 0, 20 if prompt.line in order[:2] else 0)

    checked_run = run_of(prompts=9, prompts_per_step=1)
    order = [prompt.line for _, prompt in checked_run.mixture().take(9)]
    draws, taken = DrawsInFlight(checked_run, engine, ask, lambda function: function()), list[int]()
    for step in (1, 2, 3):
        (prompt,) = draws.take(step).prompts
        taken.append(order.index(prompt.line))
        engine.version = step
    assert taken == [2, 0, 1]


def test_a_step_that_is_taken_again_keeps_no_responses_of_before(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"log_probs": [[0.0, 0.0]], "version": [[-1, 0]]}
    batch = Batch.from_sequences([[1, 2]], response_lengths=[1], **fields)
    State(2, (Draw(1, [], 0, done(batch)),)).save(tmp_path, 3, [3])
    assert [file.name for file in (tmp_path / "ahead").iterdir()] == ["00000003.safetensors"]
    State(2, ()).save(tmp_path, 3, [3])
    assert list((tmp_path / "ahead").iterdir()) == []


def test_a_checkpoint_from_before_there_were_several_sources_goes_on(tmp_path: Path) -> None:
    """It has the place of each draw alone; its rows follow from their order."""
    checked_run = run_of(prompts=5, prompts_per_step=2)

    def ask(of_draw: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        return done(Batch.from_sequences([[prompt.line, 1] for prompt in of_draw], response_lengths=[1] * len(of_draw)))

    engine: Any = SimpleNamespace(version=0)
    draws, again = (Draws(checked_run, engine, ask, lambda function: function()) for _ in range(2))
    for step in (1, 2, 3):
        draws.take(step)
    state = draws.state.to_json()
    assert [len(entry) for entry in state["ahead"]] == [3, 3]
    again.resume({"position": state["position"], "ahead": [entry[:2] for entry in state["ahead"]]}, tmp_path, 3)
    assert json.dumps(again.state.to_json()) == json.dumps(state)
    assert again.take(4).batch.tokens.tolist() == draws.take(4).batch.tokens.tolist()


@pytest.mark.parametrize(("of_draws", "ahead"), [(Draws, 1), (DrawsInFlight, 2)])
@pytest.mark.parametrize("saves", [False, True])
def test_a_resumed_run_of_fewer_steps_draws_nothing_for_the_others_and_keeps_them_for_a_run_of_more(
    tmp_path: Path, of_draws: type[Draws], ahead: int, saves: bool
) -> None:
    checked_run, asked = run_of(prompts=9, prompts_per_step=2), list[int]()

    def ask(of_draw: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        asked.append(len(of_draw))
        return done(Batch.from_sequences([[prompt.line, 1] for prompt in of_draw], response_lengths=[1] * len(of_draw)))

    engine: Any = SimpleNamespace(version=0)
    draws, again, last = (of_draws(checked_run, engine, ask, lambda function: function()) for _ in range(3))
    draws.take(1)
    state = draws.state.to_json()
    assert len(state["ahead"]) == 2 * ahead
    if saves:
        draws.state.save(tmp_path, 1, [1])
    checked_run.options.steps = 2
    asked.clear()
    again.resume(state, tmp_path, 1)
    assert asked == ([] if saves else [2 // ahead] * ahead)
    assert again.take(2).batch.tokens.tolist() == draws.take(2).batch.tokens.tolist()
    again.wait(2)
    again.state.save(tmp_path, 2, [2])
    checked_run.options.steps = 9
    asked.clear()
    last.resume(again.state.to_json(), tmp_path, 2)
    assert asked == ([] if saves else [2 // ahead] * ahead)
    for step in (3, 4):
        assert last.take(step).batch.tokens.tolist() == draws.take(step).batch.tokens.tolist()
