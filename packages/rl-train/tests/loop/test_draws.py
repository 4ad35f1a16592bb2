"""Responses drawn ahead of learning: against a loop written out here, after a kill, and with an engine that dies."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ckpt.training import open_step
from parallel_models import SamplingOptions
from rl_models import Actor, Batch, OptimizerOptions, losses
from rl_models.api import WholeBatches
from rl_train.data.mixture import read_sources, split_sources
from rl_train.data.prompts import PromptReader
from rl_train.engines import EngineOnRanks, NativeEngine, RolloutEngine
from rl_train.engines.engine_on_ranks import BatchFuture
from rl_train.engines.interface import Request, Response, Responses, WeightsLostError
from rl_train.loop.batches import read_batches
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.folder import write_options
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.objective import ADVANTAGES
from rl_train.loop.reinforcement import Reinforcement
from rl_train.options.options import TrainOptions
from rl_train.weight_sync.buckets import NamedTensors

SLOW = pytest.mark.slow

SAMPLES, PROMPTS, LONGEST = 2, 3, 4
Make = Callable[..., Any]


def first_token(prompt: str, response: str, row: Any) -> float:
    return float(response[:1] > "m")


def fresh_actor(options: TrainOptions) -> WholeBatches:
    optimizer = OptimizerOptions(options.optimizer.learning_rate)
    return WholeBatches(Actor.from_pretrained(options.model, device="cpu", optimizer=optimizer))


class Recording(NativeEngine):
    """Keeps the responses that it draws."""

    def generate(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Batch:
        batch = super().generate(prompts, sampling)
        vars(self).setdefault("drawn", []).append((self.version, batch))
        return batch


@pytest.fixture
def make(model: Path, prompts: Path, tmp_path: Path, in_process: Any) -> Make:
    def loop(engine: Callable[[Any], RolloutEngine] = Recording, reward: Any = first_token, **options: Any) -> Any:
        given: dict[str, Any] = {
            "out": tmp_path / "run", "algorithm": "grpo", "prompts_per_step": PROMPTS, "samples": SAMPLES, "steps": 4,
            "max_new_tokens": LONGEST, "learning_rate": 0.02, "save_every": 0, "seed": 5, "prompts": prompts,
        }  # fmt: skip
        resolved = TrainOptions(model=model, reward="r:f", **given | options)
        write_options(resolved)
        models = Models(fresh_actor(resolved))
        checked_run = CheckedRun(
            resolved, read_sources(PromptReader(model), split_sources(resolved.prompts))[0], [], (), None
        )
        rollouts, rewards = engine(models.actor), in_process(reward)
        recipe = Reinforcement(lambda make: make(), print, True, checked_run, models, rollouts, rewards)
        return Loop(resolved, resolved, recipe)

    return loop


def metrics(loop: Any) -> list[dict[str, Any]]:
    lines = (loop.options.out / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if "second" not in name} for line in lines]


def by_hand(loop: Any, staleness: int) -> tuple[Any, list[Batch], list[dict[str, float]]]:
    """Return a fresh actor after all steps, the responses that each step learns from, and its updates' metrics.

    Every step is written out; the responses of step k are drawn before step k - `staleness` is learned.
    """
    options, rows = loop.options, loop.recipe.checked_run.prompts
    actor = fresh_actor(options)
    models = Models(actor)
    orders = [random.Random(f"{options.seed}/{epoch}").sample(range(len(rows)), len(rows)) for epoch in range(2)]
    order = [index for epoch in orders for index in epoch]
    drawn, said = list[Batch](), list[dict[str, float]]()
    for step in range(options.steps):
        while len(drawn) <= min(step + staleness, options.steps - 1):
            end = (len(drawn) + 1) * PROMPTS
            asked = [rows[index].tokens for index in order[end - PROMPTS : end]]
            draws = {"n": SAMPLES, "max_new_tokens": LONGEST, "seed": options.seed * 1_000_003 + end}
            drawn.append(actor.generate(asked, **draws))
        batch = models.estimate(drawn[step], options)
        texts = [loop.recipe.checked_run.codec.decode(response.tolist()) for response in batch.responses()]
        scores = torch.tensor([first_token("", text, None) for text in texts])
        groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        batch = batch.with_fields(**ADVANTAGES["group-relative"](batch, scores, groups, options))
        if options.objective.importance.cap is not None:
            weights = losses.importance_weights(
                batch["old_log_probs"],
                batch["log_probs"],
                batch.mask,
                batch.lengths,
                cap=options.objective.importance.cap,
            ).weights
            batch = batch.with_fields(importance_weights=weights)
        said.append(models.update(batch, options))
    return actor, drawn, said


@pytest.mark.parametrize(
    ("staleness", "cap"), [pytest.param(0, None, marks=SLOW), (1, 1.1), pytest.param(2, None, marks=SLOW)]
)
def test_a_run_is_bit_for_bit_the_loop_written_out(make: Make, staleness: int, cap: float | None) -> None:
    loop = make(importance_cap=cap) if staleness == 0 else make(staleness=staleness, importance_cap=cap)
    loop.run()
    actor, drawn, said = by_hand(loop, staleness)
    for (_, found), expected in zip(loop.recipe.rollouts.drawn, drawn, strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found["log_probs"], expected["log_probs"])
    for found, expected in zip(metrics(loop), said, strict=True):
        assert {name: found[name] for name in expected} == expected
    saved = Actor.from_pretrained(loop.options.out / "actor", device="cpu")
    before = Actor.from_pretrained(loop.options.model, device="cpu")
    weights = [list(worker.engine.module.parameters()) for worker in (saved, actor.worker, before)]
    assert all(torch.equal(one, other) for one, other in zip(weights[0], weights[1], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights[0], weights[2], strict=True)), "it learned"


@pytest.mark.parametrize("staleness", [0, 1, pytest.param(2, marks=SLOW)])
def test_metrics_name_the_version_that_drew_the_responses(make: Make, staleness: int) -> None:
    truncation = {} if staleness == 1 else {"top_k": 8, "top_p": 0.7, "sampling.keep_sampling_mask": True}
    loop = make(staleness=staleness, importance_cap=2.0, learning_rate=0.05, **truncation)
    loop.run()
    found = metrics(loop)
    assert [line["rollout_version"] for line in found] == [max(0, step - staleness) for step in range(4)]
    assert [line["staleness"] for line in found] == [min(step, staleness) for step in range(4)]
    assert [version for version, _ in loop.recipe.rollouts.drawn] == [line["rollout_version"] for line in found]
    if staleness:
        assert [line["staleness_mean"] for line in found] == [line["staleness"] for line in found]
        shares = [[line[f"staleness_share@{number}"] for number in range(staleness + 1)] for line in found]
        assert shares == [[float(number == line["staleness"]) for number in range(staleness + 1)] for line in found]
    else:
        assert not any("staleness_" in name for line in found for name in line)
    for line in found:
        # The sampler's own log-probs arrive: they are the trainer's where the versions are the same, truncated or not.
        assert (line["rollout_difference"] < 1e-5) == (line["staleness"] == 0), line
        assert (line["importance_sample_size"] < 1 - 1e-6) == (line["staleness"] > 0), line
        assert 0 <= line["rollout_difference_mean"] <= line["rollout_difference"]
        assert line["rollout_kl"] >= 0


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=SLOW)])
def test_after_a_kill_every_prompt_is_learned_once(make: Make, dynamic: bool) -> None:
    """The responses of older weights come from their file; the order of the prompts goes on."""
    learned: list[list[int]] = []

    def run(steps_before_the_kill: int | None) -> Any:
        scores = itertools.cycle([0.0, 1.0])
        options: dict[str, Any] = {"algorithm": "dapo"} if dynamic else {}
        loop = make(staleness=2, steps=6, save_every=1, reward=lambda *_: next(scores), **options)
        update = loop.recipe.models.actor.update

        def counted(part: Batch, *args: Any, **kwargs: Any) -> Any:
            if len(learned) == steps_before_the_kill:
                raise KeyboardInterrupt
            starts = torch.tensor([0, *part.lengths[:-1]]).cumsum(0)
            learned.append(part.tokens[starts].tolist()[::SAMPLES])
            return update(part, *args, **kwargs)

        loop.recipe.models.actor.update = counted
        return loop

    first = run(2)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    first.recipe.models.actor.wait_for_save()  # the save of the second step runs in the background
    again = run(None)
    assert again._resume(again.options.out / "training") == 2
    state = again.recipe._draws.state.to_json()
    assert state["position"] == 4 * PROMPTS
    assert [entry[:2] for entry in state["ahead"]] == [[2 * PROMPTS, 0], [3 * PROMPTS, 1]]
    run(None).run()
    firsts = [int(prompt.tokens[0]) for _, prompt in again.recipe.checked_run.mixture().take(6 * PROMPTS)]
    assert [token for step in learned for token in step] == firsts
    assert [line["rollout_version"] for line in metrics(again)] == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "partial", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), "mixture"]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(make: Make, tmp_path: Path, partial: int | str) -> None:
    """Responses drawn ahead stay those of the weights that drew them; of older steps no file is left.

    Also with a curriculum over a mixture of two files, of which three rows at a time are in memory.
    """
    given: dict[str, Any] = {"staleness": 2, "steps": 6, "save_every": 1, "keep": 1, "importance_cap": 1.1}
    if partial == "mixture":
        files = [tmp_path / name for name in ("consonants.jsonl", "vowels.jsonl")]
        for file, letters in zip(files, ("bcdfghjkl", "aeiou"), strict=True):
            file.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in letters))
        given |= {"prompts": ",".join(map(str, files)), "data.weights": "2,1", "data.shuffle_buffer": 3}
        given |= {"data.curriculum": 0.5}
    elif partial:
        given |= {"rollouts.partial": partial, "stop_ids": ",".join(map(str, range(2, 16)))}
    whole, killed = make(out=tmp_path / "whole", **given), make(**given)
    whole.run()
    update, updates = killed.recipe.models.actor.update, itertools.count()

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(updates) == 3:
            raise KeyboardInterrupt
        return update(*args, **kwargs)

    killed.recipe.models.actor.update = dying
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    killed.recipe.models.actor.wait_for_save()
    folder = killed.options.out / "training" / "ahead"
    assert [file.name for file in sorted(folder.iterdir())] == ["00000002.safetensors", "00000003.safetensors"]
    make(**given).run()
    again = make(**given)
    assert metrics(again) == metrics(whole)
    if partial == "mixture":
        assert all(line["source_share/vowels"] == 1 / 3 for line in metrics(whole))
        training = [loop.options.out / "training" / "actor" for loop in (whole, killed)]
        kept = [open_step(each, 6)[1]["extra"]["extra"] for each in training]
        assert kept[0] == kept[1]
        assert len(kept[0]["rewards_of_prompts"]) > 6
    saved = [load_file(loop.options.out / "actor" / "model.safetensors") for loop in (whole, killed)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())
    (folder / "00000004.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"00000004.safetensors is broken .*; remove it, and its responses are drawn"):
        read_batches(folder / "00000004.safetensors")


def test_responses_ahead_belong_to_rows_that_have_not_changed(make: Make, tmp_path: Path) -> None:
    draws = make(staleness=1, **{"data.curriculum": 0.5}).recipe._draws
    draws.observe(draws.take(1).prompts, torch.ones(PROMPTS, SAMPLES))
    state = draws.state
    state.save(tmp_path, 1, [1])
    for changes, ahead in (((), 1), (("reward=r:f had digest 1",), 1), (("prompts=p had 12 rows",), 0)):
        recipe = make(staleness=1, **{"data.curriculum": 0.5}).recipe
        rows = recipe.checked_run.prompts if ahead else [replace(recipe.checked_run.prompts[0], tokens=[7])] * 3
        recipe.checked_run = replace(recipe.checked_run, prompts=rows, changes=changes)
        recipe._draws.resume(state.to_json(), tmp_path, 1)
        assert len(recipe._draws.state.ahead) == ahead
        assert bool(recipe._draws.state.order["rewards_of_prompts"]) == bool(ahead)
        drawn = recipe._draws.take(2)
        begins = [row[:1].tolist() for row in drawn.batch.split()[::SAMPLES]]
        assert begins == [prompt.tokens[:1] for prompt in drawn.prompts], "each response has its own row"


def test_further_batches_of_dynamic_sampling_are_drawn_with_the_newest_weights(make: Make) -> None:
    equal = [1.0] * (SAMPLES * PROMPTS)
    differ = [0.0, 1.0] * PROMPTS
    scores = itertools.chain(differ, equal, differ, differ, differ)
    loop = make(algorithm="dapo", staleness=1, steps=3, reward=lambda *_: next(scores))
    loop.run()
    assert [version for version, _ in loop.recipe.rollouts.drawn] == [0, 0, 1, 1]
    assert [(line["rollout_version"], line["staleness"]) for line in metrics(loop)] == [(0, 0), (0, 1), (1, 1)]
    state = loop.recipe._draws.state.to_json()
    assert (state["position"], state["ahead"]) == (4 * PROMPTS, [])


class OnOtherDevices(Recording):
    """Draws in a thread of its own, and dies at a call."""

    def __init__(self, actor: Any, dies_at: int = 99) -> None:
        # Weights that do not change while the actor learns.
        folder = actor.worker.engine.source
        super().__init__(WholeBatches(Actor.from_pretrained(folder, device="cpu")))
        self.thread, self.calls, self.dies_at = ThreadPoolExecutor(1), 0, dies_at

    def generate_async(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Future[Batch]:
        self.calls += 1
        if self.calls == self.dies_at:
            return self.thread.submit(self.die)
        return self.thread.submit(self.generate, prompts, sampling)

    def die(self) -> Batch:
        raise RuntimeError("the engine died")

    def update_weights(self, actor: Any, version: int) -> None:
        own = self.actor.worker.engine.module
        own.load_state_dict(actor.worker.engine.module.state_dict())
        self.version = version


class Late(OnOtherDevices):
    """Draws when a result is asked for."""

    def generate_async(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Future[Batch]:
        return BatchFuture(lambda future: self.generate(prompts, sampling))


@pytest.mark.parametrize("engine", [OnOtherDevices, pytest.param(Late, marks=SLOW)])
def test_an_engine_of_its_own_draws_what_the_native_engine_draws(
    make: Make, tmp_path: Path, engine: type[OnOtherDevices]
) -> None:
    """No weights change while responses are in flight."""
    here, apart = make(staleness=2), make(engine, staleness=2, out=tmp_path / "apart")
    here.run()
    apart.run()
    assert metrics(here) == metrics(apart)
    for (version, found), (expected, batch) in zip(
        apart.recipe.rollouts.drawn, here.recipe.rollouts.drawn, strict=True
    ):
        assert version == expected
        assert torch.equal(found.tokens, batch.tokens)


def test_an_engine_that_dies_is_raised_in_the_step_that_needs_its_responses(make: Make) -> None:
    loop = make(lambda actor: OnOtherDevices(actor, dies_at=3), staleness=1)
    with pytest.raises(RuntimeError, match="the engine died"):
        loop.run()
    assert [line["step"] for line in metrics(loop)] == [1, 2], "the third draw is asked for in step 2, for step 3"


class Broken(OnOtherDevices):
    """Gives the second token of the fourth response to the second draw a log-prob that is not finite."""

    log_prob, token = float("nan"), -1

    def generate(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Batch:
        batch = super().generate(prompts, sampling)
        if len(vars(self)["drawn"]) == 2:
            place = int((batch.mask & (batch.sequence_ids == 3)).nonzero()[1])
            batch["log_probs"][place], self.token = self.log_prob, int(batch.tokens[place])
        return batch


@pytest.mark.parametrize(("log_prob", "staleness"), [(float("nan"), 0), (float("-inf"), 1)])
def test_a_log_prob_that_is_not_finite_is_named(make: Make, log_prob: float, staleness: int) -> None:
    loop = make(Broken, staleness=staleness)
    engine = loop.recipe.rollouts
    engine.log_prob = log_prob
    row = loop.recipe.checked_run.mixture().take(2 * PROMPTS)[PROMPTS + 1][1]
    with pytest.raises(ValueError, match=r"check the weights and the dtype of the engine") as raised:
        loop.run()
    error = (
        f"{row.place}: rollouts=native gives token 2 of response 2, the id {engine.token}, the log-prob {log_prob}, "
    )
    assert str(raised.value).startswith(error)
    assert [line["step"] for line in metrics(loop)] == [1]


class Losing:
    """Loses its weights at the third draw; keeps a number of the weights of each weight sync and each draw."""

    def __init__(self) -> None:
        self.begun, self.drawn, self.loaded = 0, list[float](), [0.0]

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        self.begun += 1
        if self.begun == 3:
            return self.lose
        self.drawn.append(self.loaded[-1])
        return lambda: [[Response([request.prompt[0]], [0.0])] * sampling.n for request in requests]

    def lose(self) -> Responses:
        raise WeightsLostError("lost")

    def load(self, named_tensors: NamedTensors) -> None:
        self.loaded.append(sum(float(tensor.double().sum()) for _, tensor in named_tensors))

    def sleep(self) -> None:
        pass

    wake = close = sleep


def test_responses_that_are_drawn_anew_have_the_version_of_the_new_weights(make: Make, model: Path) -> None:
    """The third draw is asked for with version 1, lost while step 2 learns, and drawn with version 2."""
    local = Losing()
    loop = make(lambda actor: EngineOnRanks(actor, model, lambda: local), staleness=1, reward=lambda *_: next(scores))
    scores = itertools.cycle([0.0, 1.0])
    learned = list[Batch]()
    update = loop.recipe.models.actor.update
    loop.recipe.models.actor.update = lambda batch, *args, **options: (
        learned.append(batch) or update(batch, *args, **options)
    )
    loop.run()
    _, first, anew, second, *_ = local.loaded
    assert anew == second != first
    assert local.drawn == [0.0, 0.0, anew, second]
    assert [line["rollout_version"] for line in metrics(loop)] == [0, 0, 2, 2]
    for batch, version in zip(learned, [0, 0, 2, 2], strict=True):
        assert torch.equal(batch["version"], torch.where(batch.mask, version, -1)), "the field of each token"
