"""Responses that go on in later steps: with an engine of chosen lengths, and with a model whose weights change."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import CliRunner

from parallel_models import SamplingOptions
from rl_models import Actor, Batch
from rl_train.cli.commands import app
from rl_train.data.mixture import Mixture
from rl_train.data.prompts import Prompt, read_prompts
from rl_train.engines import EngineOnRanks, Native, NativeEngine
from rl_train.loop.partial_rollouts import PartialRollouts

from ..engines.test_separate import changed
from .test_train import arguments, lines

SAMPLES, LONGEST, STOP = 2, 7, 9


def partial_rollouts(
    engine: Any, prompts: Sequence[Prompt], stop_ids: Sequence[int] = (STOP,), **options: Any
) -> PartialRollouts:
    rollouts = SimpleNamespace(staleness=options.pop("staleness"), partial=options.pop("partial"))
    known = {"seed": 1, "samples": SAMPLES, "prompts": Path(), "sampling": SamplingOptions(LONGEST), "steps": 7}
    known["data"] = SimpleNamespace(curriculum=None)
    options_of_run = SimpleNamespace(rollouts=rollouts, **known | options)
    run: Any = SimpleNamespace(options=options_of_run, stop_ids=stop_ids, changes=())
    run.mixture = partial(Mixture.of_rows, prompts, seed=1)
    return PartialRollouts(run, engine, None, None)  # type: ignore[arg-type]


class Lengths:
    """Draws responses of chosen lengths; the first token is the number of the response, log-probs tell the places."""

    def __init__(self, chance: random.Random, longest: int) -> None:
        self.version, self.chance, self.longest = 0, chance, longest
        self.lengths, self.drawn, self.seeds = list[int](), 0, set[int]()

    def generate(self, prompts: list[list[int]], sampling: SamplingOptions) -> Batch:
        assert (sampling.n, sampling.stop_ids) == (1, [STOP])
        assert sampling.seed not in self.seeds, "another seed for each call"
        self.seeds.add(sampling.seed)
        parts = [self.part(row, sampling.limit(len(row))) for row in prompts]
        self.drawn += sum(map(len, parts))
        rows = [row + part for row, part in zip(prompts, parts, strict=True)]
        places = [[-float(place) for place in range(len(row))] for row in rows]
        return Batch.from_sequences(rows, response_lengths=list(map(len, parts)), log_probs=places)

    def part(self, row: list[int], limit: int) -> list[int]:
        """A response of one token or of LONGEST just ends, as others may; another one ends with the token STOP."""
        begin, tokens = len(row) - 2, row[2:]
        if not tokens:
            self.lengths.append(self.chance.choice([1, 2, 2, 2, self.longest]))
            tokens = [100 + len(self.lengths) - 1]
        length = self.lengths[tokens[0] - 100]
        whole = (tokens[:1] + [50] * length)[:length]
        whole[-1:] = [STOP] if 1 < length < LONGEST else whole[-1:]
        return whole[begin:][:limit]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False), st.integers(1, LONGEST),
    st.integers(1, LONGEST + 1), st.sampled_from([0, 2]),
)  # fmt: skip
def test_every_token_is_learned_once_and_in_time(
    tmp_path: Path, staleness: int, prompts_per_step: int, chance: random.Random, longest: int, part: int, kills: int
) -> None:
    """Also where a step draws more, and after kills: a resumed run goes on with the parts that it had."""
    prompts = [Prompt([number, number], {}, number) for number in range(200)]
    engine = Lengths(chance, longest)

    def made() -> PartialRollouts:
        return partial_rollouts(engine, prompts, staleness=staleness, prompts_per_step=prompts_per_step, partial=part)

    draws, learned, tokens = made(), list[int](), 0
    order = [prompt.line for _, prompt in Mixture.of_rows(prompts, seed=1).take(200)]
    for step in range(1, 8):
        taken = [draws.take(step)]
        if more := chance.choice([0, 0, prompts_per_step]):
            taken.append(draws.more(more))
        for drawn in taken:
            batch, asked = drawn.batch, [prompt.line for prompt in drawn.prompts]
            assert asked == sorted(asked, key=order.index), "the oldest first"
            assert batch.tokens[batch.first].tolist() == [line for line in asked for _ in range(SAMPLES)]
            versions = batch["version"][batch.mask]
            assert step - 1 - staleness <= int(versions.min()) <= int(versions.max()) <= step - 1
            for row, mask, version in zip(batch.split(), batch.split("mask"), batch.split("version"), strict=True):
                assert len(row) - 2 == engine.lengths[int(row[2]) - 100], "complete"
                assert mask.tolist() == [False] * 2 + [True] * (len(row) - 2)
                assert version[2:].tolist() == sorted(version[2:].tolist())
            places = torch.cat([torch.arange(length) for length in batch.lengths])
            assert batch["log_probs"].tolist() == torch.where(batch.mask, -places, 0).tolist()
            learned, tokens = learned + asked, tokens + int(batch.mask.sum())
        draws.wait(step)
        engine.version, state = step, draws.state
        if kills and step % kills == 0:
            state.save(tmp_path, step, [step])
            draws = made()
            draws.resume(json.loads(json.dumps(state.to_json())), tmp_path, step)
            assert draws.state.to_json() == state.to_json()
            for draw, before in zip(draws.state.ahead, state.ahead, strict=True):
                assert draw.responses.result().tokens.tolist() == before.responses.result().tokens.tolist()
    assert len(learned) == len(set(learned)), "every prompt once"
    ahead = [draw.responses.result() for draw in draws.state.ahead]
    assert engine.drawn == tokens + sum(int(batch.mask.sum()) for batch in ahead), "no token is lost"


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_token_has_the_log_prob_of_the_weights_that_drew_it(model: Path, prompts: Path, apart: bool) -> None:
    """The weights change after each step; with sampling masks, by which the log-probs are normalised."""
    actors = [Actor.from_pretrained(model, device="cpu"), changed(model), Actor.from_pretrained(model, device="cpu")]
    with torch.no_grad():
        for parameter in actors[2].engine.module.parameters():
            parameter *= 1.5
    engine: Any = NativeEngine(actors[0], keep_cache=True)
    if apart:
        engine = EngineOnRanks(actors[0], model, lambda: Native(model, device="cpu"))
    sampling = SamplingOptions(LONGEST, top_k=25, top_p=0.99, keep_sampling_mask=True)
    given: dict[str, Any] = {"staleness": 2, "partial": 2, "prompts_per_step": 2, "sampling": sampling}
    draws = partial_rollouts(engine, read_prompts(prompts, model, 99), range(2, 12), **given)
    mixed = 0
    for step in range(1, 6):
        drawn = draws.take(step)
        versions = drawn.batch["version"]
        for version in versions[drawn.batch.mask].unique().tolist():
            expected = actors[version % 3].log_probs(drawn.batch.select(range(len(drawn.batch)))).log_probs
            at = versions == version
            torch.testing.assert_close(drawn.batch["log_probs"][at], expected[at], rtol=0, atol=1e-5)
        mixed += sum(len(row[row >= 0].unique()) > 1 for row in drawn.batch.split("version"))
        assert drawn.batch.sampling_mask is not None
        assert drawn.batch.sampling_mask.check(drawn.batch.tokens, 10**6).tolist() == (~drawn.batch.mask).tolist()
        if apart:
            engine.update_weights(actors[step % 3], step)
        else:
            engine.actor, engine.version = actors[step % 3], step
    assert mixed > 3
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize("options", [{"rollouts.devices": "cpu,cpu"}, {"dims": "dp=2", "algorithm": "dapo"}], ids=str)
def test_a_run_learns_from_partial_rollouts(
    model: Path, prompts: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    given = {"algorithm": "grpo", "steps": 4, "samples": 2, "staleness": 2, "rollouts.partial": 2, **options}
    given |= {"importance-cap": 2, "stop-ids": "2,4,5,6,7,8,9,10,11,12"}
    result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", **given))
    assert result.exit_code == 0, result.output
    records = lines(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert max(record["staleness"] for record in records) > 0
    assert all(record["rollout_difference"] < 1e-4 for record in records if record["staleness"] == 0)
