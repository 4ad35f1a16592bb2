"""The loop in this process, on one rank, with rewards that the test decides."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ckpt import Checkpoint
from ckpt.training import saved_steps
from rl_models import Actor, Batch
from rl_models.api import WholeBatches
from rl_train.data.prompts import Prompt, read_prompts
from rl_train.engines import NativeEngine
from rl_train.loop import reinforcement as module
from rl_train.loop.batches import mini_batches
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.folder import check_folder, how_to_go_on, newest_step, write_options
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.objective import policy_loss
from rl_train.loop.reinforcement import Reinforcement
from rl_train.loop.throughput import Throughput
from rl_train.options.options import TrainOptions
from rl_train.planner.flops import ModelFlops
from rl_train.report.lines import Metrics
from rl_train.trajectories.episodes import SAMPLE, with_episode_weights
from rl_train.trajectories.samples import TURNS

Run = Callable[..., Any]


@pytest.fixture
def run(model: Path, prompts: Path, tmp_path: Path, in_process: Any) -> Run:
    def make(reward: Any, **options: Any) -> Loop:
        small: dict[str, Any] = {"prompts_per_step": 2, "max_new_tokens": 4, "out": tmp_path / "run", "keep": 9}
        resolved = TrainOptions(model=model, prompts=prompts, reward="r:f", **small | options)
        check_folder(resolved)
        write_options(resolved)
        rows = read_prompts(prompts, model, 99)
        models = Models(WholeBatches(Actor.from_pretrained(model, device="cpu")))
        checked_run = CheckedRun(resolved, rows, [] if resolved.evaluation.prompts is None else rows[:2], (), None)
        rollouts = NativeEngine(models.actor)
        recipe = Reinforcement(
            lambda make: make(), lambda event: None, True, checked_run, models, rollouts, in_process(reward)
        )
        return Loop(resolved, resolved, recipe)

    return make


def alternating(calls: int) -> Callable[[str, str, Any], float]:
    """Scores that differ for so many calls, and are the same from then on."""
    left = iter(range(calls))
    return lambda prompt, response, row: next(left, 0) % 2


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "options", [{"algorithm": "dapo", "max_batches": 1}, {"algorithm": "grpo", "equal_groups": "drop"}]
)
def test_prompts_with_equal_scores_are_dropped_before_the_penalty_for_length(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    scores = iter([0.0, 0.0, 1.0, 0.0])  # the first prompt's are all wrong, and differ in length
    loop = run(lambda *_: next(scores), samples=2, **{"rewards.overlong_buffer": 4}, **options)
    said: list[Any] = []
    loop.recipe.tell = said.append
    generate = loop.recipe.models.actor.generate

    def ragged(*args: Any, **options: Any) -> Any:
        batch = generate(*args, **options)
        rows = [row[: len(row) - cut] for row, cut in zip(batch.split(), (0, 2, 0, 2), strict=True)]
        return type(batch).from_sequences(rows, response_lengths=[4, 2, 4, 2])

    monkeypatch.setattr(loop.recipe.models.actor, "generate", ragged, raising=False)
    rollouts, values = loop.recipe._collect(1)
    found = rollouts.experience
    assert len(found.batch) == 2
    assert found.scores.tolist() == [[0.0, -0.5]]
    # What is logged is of all that was drawn, what was kept has names of its own.
    assert (values["responses"], values["responses_kept"]) == (4, 2)
    assert (values["reward"], values["reward_kept"]) == ((-1 - 0.5 + 0 - 0.5) / 4, -0.25)
    assert values["response_length"] == 3
    assert values["frac_reward_zero_std"] == 0
    assert (values["prompts_dropped"], values["batches_drawn"]) == (1, 1)
    short = "step 1: only 1 of 2 prompts have responses that differ in reward, after 1 batches (--max-batches)"
    assert [event["message"].startswith(short) for event in said if "message" in event] == [True] * (
        "max_batches" in options
    )


def test_a_step_that_drops_all_prompts_says_so_and_learns_nothing(run: Run) -> None:
    loop = run(alternating(0), algorithm="rloo", samples=2, equal_groups="drop", steps=2, save_every=0)
    before = [parameter.detach().clone() for parameter in loop.recipe.models.actor.worker.engine.module.parameters()]
    said: list[Any] = []
    loop.recipe.tell = said.append
    values = loop.run()
    assert steps(loop.options.out) == [1, 2]
    assert (values["responses"], values["responses_kept"], values["prompts_dropped"]) == (4, 0, 2)
    assert "loss" not in values
    messages = [event["message"] for event in said if "message" in event]
    assert [message.split(" (")[0] for message in messages] == [
        "step 1: the responses to each prompt have equal rewards"
    ]
    for parameter, start in zip(loop.recipe.models.actor.worker.engine.module.parameters(), before, strict=True):
        assert torch.equal(parameter, start)


def test_a_step_whose_responses_are_all_vetoed_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = run(alternating(99), samples=2, steps=1, importance_cap=2.0, **{"objective.importance.veto": 0.9})
    generate = loop.recipe.models.actor.generate

    def off_policy(*args: Any, **options: Any) -> Any:
        batch = generate(*args, **options)
        return batch.with_fields(log_probs=batch["log_probs"] + 1)

    monkeypatch.setattr(loop.recipe.models.actor, "generate", off_policy, raising=False)
    said: list[Any] = []
    loop.recipe.tell = said.append
    values = loop.run()
    assert (values["importance_vetoed"], values["importance_rejected"], values["loss"]) == (1, 1, 0)
    assert "step 1: importance sampling rejects all responses; look at --importance-*" in [
        event.get("message") for event in said
    ]


def test_the_routing_of_the_engine_is_compared_every_show_every_steps(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = Models.estimate

    def with_routing(self: Models, batch: Batch, options: TrainOptions) -> Batch:
        return estimate(self, batch, options).with_fields(routing=torch.zeros(batch.num_tokens, 1, 1))

    monkeypatch.setattr(Models, "estimate", with_routing)
    monkeypatch.setattr(Models, "routing_difference", lambda *_: 0.25)
    loop = run(alternating(99), samples=2, show_every=2, **{"rollouts.routing": True})
    values = [loop.recipe.collect(step)[1] for step in (1, 2, 3)]
    assert [of_step.get("routing_difference") for of_step in values] == [None, 0.25, None]


@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo", "rloo"])
def test_an_episode_of_several_samples_counts_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """A response as one sample, or as one sample for each half: the gradients are the same."""

    def gradients(out: str, cut: Callable[[Any], Any]) -> tuple[Any, list[torch.Tensor]]:
        loop = run(alternating(99), out=tmp_path / out, algorithm=algorithm, samples=2, steps=1, save_every=0)
        actor, generate = loop.recipe.models.actor, loop.recipe.models.actor.generate
        monkeypatch.setattr(actor, "generate", lambda *args, **options: cut(generate(*args, **options)))
        values = loop.run()
        batch, _ = loop.recipe._estimate(loop.recipe._collect(1)[0].experience)
        aggregation, worker = loop.options.objective.aggregation, loop.recipe.models.actor.worker
        batch = with_episode_weights(batch, aggregation)
        worker.forward_backward(batch, partial(policy_loss, loop.options), aggregation=aggregation)
        return values, [parameter.grad for parameter in worker.engine.module.parameters()]

    def in_halves(batch: Batch) -> Batch:
        """Return every second response as two samples, of the first two drawn tokens and of the others."""
        rows = [number for number in range(len(batch)) for _ in range(1 + number % 2)]
        halves = batch.select(rows)
        number = torch.tensor([0, 0, 1] * (len(batch) // 2))[halves.sequence_ids]
        drawn = halves.mask.cumsum(0) - 1 - 4 * halves.sequence_ids  # the number of a drawn token, of 4 each
        alone = torch.tensor([True, False, False] * (len(batch) // 2))[halves.sequence_ids]
        mask = halves.mask & (alone | ((drawn >= 2) == (number == 1)))
        return replace(halves, mask=mask).with_fields(**{SAMPLE: number, TURNS: torch.zeros(halves.num_tokens, 5)})

    whole, expected = gradients("whole", lambda batch: batch)
    values, actual = gradients("halves", in_halves)
    same = ("reward", "responses", "response_length", "loss", "grad_norm")
    assert {name: values[name] for name in same} == pytest.approx(
        {name: whole[name] for name in same}, rel=1e-4, abs=1e-6
    )
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-3
    for gradient, of_whole in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, of_whole, rtol=1e-4, atol=1e-6)


def test_groups_of_one_rank_are_marked_for_learning(run: Run) -> None:
    parts = []
    for on_one_rank in (False, True):
        loop = run(alternating(99), samples=2, groups_on_one_rank=on_one_rank)
        batch, _ = loop.recipe._estimate(loop.recipe._collect(1)[0].experience)
        parts.append(batch)
    assert "group" not in parts[0].fields
    assert parts[1].units("group") == [0, 0, 1, 1]


def test_a_step_counts_the_tokens_that_dynamic_sampling_discards(run: Run) -> None:
    scores = iter([1.0, 1.0, 0.0, 1.0] * 2)  # of two prompts one is kept, so a second batch, of one prompt, is drawn
    loop = run(lambda *_: next(scores), algorithm="dapo", samples=2, stop_ids="")
    values = loop._step(1)
    assert (values["responses"], values["responses_kept"]) == (8, 4)
    assert values["tokens"] == 8 * (2 + 4), "of two tokens a prompt and four a response"
    assert values["tokens_per_second"] == values["tokens"] / values["seconds"]


def test_a_step_counts_the_flops_of_its_draws_its_log_probs_and_its_update(run: Run) -> None:
    loop = run(alternating(99), samples=2, stop_ids="")
    loop.throughput, recipe, model = Throughput(loop.options), loop.recipe, Checkpoint(loop.options.model)
    loop.throughput.peak = 1.0
    actor = loop.throughput.counted(recipe.models.actor, model, "causal_lm", None)
    recipe.models, recipe.rollouts = replace(recipe.models, actor=actor), NativeEngine(actor)
    values = loop._step(1)
    flops, lengths = ModelFlops.of(model), [2 + 4] * 4
    assert values["mfu"] * values["seconds"] == pytest.approx(2 * flops.forward(lengths) + flops.update(lengths))
    learning = recipe.seconds["seconds_learning"]
    assert values["mfu_learning"] * learning == pytest.approx(flops.update(lengths))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("grpo", "step 1: the responses to each prompt have equal rewards (their mean is 0.5)"),
        ("reinforce++", "step 1: all rewards are equal (their mean is 1)"),
    ],
)
def test_steps_whose_rewards_are_all_equal_are_said_once(run: Run, algorithm: str, said: str) -> None:
    # Of the first prompt right, of the second wrong; in the third step all differ, in the fourth they are equal again.
    scores = iter([1, 1, 0, 0] * 2 + [0, 1, 0, 1] + [1] * 4 if algorithm == "grpo" else [1] * 4 + [0, 1] + [1] * 2)
    loop = run(lambda *_: next(scores), algorithm=algorithm, samples=2 if algorithm == "grpo" else 1, steps=4)
    events: list[Any] = []
    loop.recipe.tell = events.append
    loop.run()
    messages = [event["message"] for event in events if "message" in event]
    assert [message.split(":")[0] for message in messages] == ["step 1", "step 4"]
    assert messages[0].startswith(said)


@pytest.mark.parametrize(
    ("save_every", "saved"),
    [(3, [2]), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, [1, 2]), (0, [])))],
)
def test_what_was_learned_is_saved_when_there_is_nothing_left_to_learn(
    run: Run, save_every: int, saved: list[int]
) -> None:
    loop = run(alternating(8), algorithm="dapo", samples=2, steps=9, save_every=save_every)
    with pytest.raises(ValueError, match=r"step 3: all responses .* learned in 2 steps is saved in .*run/actor$"):
        loop.run()
    out = loop.options.out
    assert saved_steps(out / "training" / "actor") == saved
    learned, result = loop.recipe.models.actor.worker, Actor.from_pretrained(out / "actor", device="cpu")
    for one, other in zip(learned.engine.module.parameters(), result.engine.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert steps(out) == [1, 2]
    if saved:
        again = run(alternating(4), algorithm="dapo", samples=2, steps=3, save_every=save_every)
        again.run()
        assert steps(out) == [1, 2, 3], "from the prompts after those of step 2"
        assert again.recipe._draws.position == 6


def test_a_first_step_with_nothing_to_learn_saves_nothing(run: Run) -> None:
    loop = run(alternating(0), algorithm="dapo", samples=2)
    with pytest.raises(ValueError, match="there is nothing for dapo to learn; look at the reward"):
        loop.run()
    assert not (loop.options.out / "actor").exists()
    assert not (loop.options.out / "training").exists()


@pytest.mark.parametrize("save_every", [0, 2])
def test_the_same_command_again_starts_anew_or_says_the_last_metrics(run: Run, save_every: int) -> None:
    options: dict[str, Any] = {"algorithm": "reinforce++", "steps": 2, "save_every": save_every}
    first = run(alternating(99), **options).run()
    again = run(alternating(99), **options)
    found = again.run()
    assert steps(again.options.out) == [1, 2]
    assert found["reward"] == first["reward"]
    assert (found == first) == bool(save_every), "the seconds tell whether the steps ran again"


def test_the_best_and_the_worst_response_to_prompts_of_each_step_are_kept(run: Run, prompts: Path) -> None:
    scores = iter([3, 1, 2, 7, 7, 7] * 3)
    options: dict[str, Any] = {"samples": 3, "steps": 2, "save_every": 1, "stop_ids": ""}
    loop = run(lambda *_: next(scores), **options)
    loop.run()
    run(lambda *_: next(scores), **options | {"steps": 3}).run()
    found = [json.loads(line) for line in (loop.options.out / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in found] == [(n, r) for n in (1, 2, 3) for r in (3, 1, 7)]
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for line in found:
        assert line["prompt"] == rows[line["line"] - 1].get("text", line["prompt"])
        assert (line["response_length"], line["truncated"]) == (4, True)


def test_an_evaluation_has_several_responses_and_their_answers(run: Run, prompts: Path) -> None:
    rewards = iter([(0, "no"), (1, "yes"), (1, "yes"), (1, None)])
    options: dict[str, Any] = {
        "eval_prompts": prompts,
        "evaluation.samples": 2,
        "evaluation.temperature": 1.0,
        "stop_ids": "",
    }
    loop = run(lambda *_: next(rewards), **options)
    found = module.evaluate(loop.recipe.checked_run, loop.recipe._ask, loop.recipe._scorer)
    means = {"eval/reward": 0.75, "eval/response_length": 4, "eval/truncated": 1}
    assert found == means | {"eval/pass@2": 1, "eval/maj@2": 0.75}


def test_the_best_policy_is_kept_also_after_a_kill(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {0: 0.2, 2: 0.1, 4: 0.7, 5: 0.7, 6: 0.5, 7: 0.8}  # of equal ones the first is kept
    kept: list[int] = []
    said: list[str] = []
    for last, expected in ((5, [4]), (7, [4, 7])):  # the second run goes on after step 5
        options: dict[str, Any] = {
            "eval_prompts": prompts,
            "eval_every": 2,
            "evaluation.keep_best": True,
            "save_every": 1,
        }
        loop = run(alternating(99), algorithm="reinforce++", steps=last, **options)
        actor, engine = loop.recipe.models.actor, loop.recipe.rollouts
        save = actor.save_pretrained
        monkeypatch.setattr(module, "evaluate", lambda *_, engine=engine: {"eval/reward": rewards[engine.version]})
        # The engine takes the weights of a step before the evaluation.
        monkeypatch.setattr(
            actor,
            "save_pretrained",
            lambda path, engine=engine, save=save: [save(path), path.name == "best" and kept.append(engine.version)],
            raising=False,
        )
        loop.recipe.tell = lambda event: said.append(event.get("message", ""))
        loop.run()
        assert kept == expected
    assert steps(loop.options.out) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "before step 1: evaluation reward 0.200" in said
    assert "step 4: the best evaluation reward so far, 0.700; saved in best" in said
    Actor.from_pretrained(loop.options.out / "best", device="cpu")


def test_a_stopped_run_saves_a_checkpoint_and_no_result(run: Run) -> None:
    loop = run(alternating(99), algorithm="reinforce++", steps=3, save_every=9)
    (loop.options.out / "stop").touch()
    loop.run()
    assert (steps(loop.options.out), saved_steps(loop.options.out / "training" / "actor")) == ([1], [1])
    assert not (loop.options.out / "actor").exists(), "its result is that of the last step"
    (loop.options.out / "stop").unlink()
    run(alternating(99), algorithm="reinforce++", steps=3, save_every=9).run()
    assert steps(loop.options.out) == [1, 2, 3]
    assert (loop.options.out / "actor").is_dir()


@pytest.mark.parametrize(("done", "kept"), [(0, []), (1, [0, 1])])
def test_a_run_that_starts_again_also_evaluates_before_its_first_step_again(
    tmp_path: Path, done: int, kept: list[int]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward": {step}}}\n' for step in range(3)))
    metrics = Metrics(tmp_path, done=done)
    assert (steps(tmp_path), metrics.last) == (kept, {"reward": 1} if kept else {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_metrics_on_a_full_disk_name_the_place(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, done=0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"the disk of {tmp_path}/metrics.jsonl is full: the save needs 27 bytes"):
        metrics.write(1, {"reward": 0.5})


def test_a_run_that_has_gone_back_goes_on_from_latest(run: Run) -> None:
    run(alternating(99), algorithm="reinforce++", steps=4, save_every=1).run()
    root = run(alternating(99), algorithm="reinforce++", steps=4).options.out / "training" / "actor"
    (root / "latest").write_text("step-00000002\n")
    again = run(alternating(99), algorithm="reinforce++", steps=3, save_every=1)
    said = "4 of 3 steps are done; the same command goes on after step 2, the newest training checkpoint in "
    assert how_to_go_on(again.options).startswith(said)
    events: list[Any] = []
    again.recipe.tell = events.append
    again.run()
    assert events[0] == {"message": f"going on after step 2 of {root.parent}", "resumed": 2}
    assert steps(again.options.out) == [1, 2, 3]
    assert newest_step(root.parent, ["actor"]) == 3
    assert newest_step(root.parent, ["actor", "critic"]) == 0
    (root / "latest").write_bytes(b"step-00000009")
    with pytest.raises(ValueError, match="latest names 'step-00000009', which is no checkpoint"):
        newest_step(root.parent, ["actor"])


def test_each_pass_over_the_prompts_has_an_order_that_is_made_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    seeded = random.Random
    monkeypatch.setattr(random, "Random", lambda seed: made.append(seed) or seeded(seed))
    loop = run(alternating(0), seed=77)
    drawn = [index for _ in range(6) for (_, _, index), _ in loop.recipe._draws._mixture.take(4)]
    first, second = drawn[:12], drawn[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert made == ["77/0", "77/1"]
    assert first == [4, 5, 11, 7, 2, 8, 3, 1, 6, 0, 10, 9], "as in earlier releases"


def test_the_order_of_responses_in_an_epoch_is_that_of_earlier_releases(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = run(alternating(0), samples=4, mini_batch=2, epochs=2, seed=3)
    batch, _ = loop.recipe._estimate(loop.recipe._collect(2)[0].experience)
    orders: list[Any] = []
    monkeypatch.setattr(type(batch), "select", lambda self, rows: orders.append(rows) or self)
    list(loop.recipe.mini_batches(batch, 2))
    assert orders[4:] == [[2, 4], [5, 1], [7, 0], [3, 6]]


@given(st.data(), st.integers(1, 40), st.integers(1, 40))
def test_a_step_with_fewer_responses_has_as_many_mini_batches(data: st.DataObject, wanted: int, size: int) -> None:
    size = min(size, wanted)
    count = -(-wanted // size)
    found = data.draw(st.integers(count, wanted))
    parts = mini_batches(found, wanted, size)
    assert len(parts) == count
    assert [index for start, end in parts for index in range(start, end)] == list(range(found))
    assert all(end - start <= size for start, end in parts)
    whole = mini_batches(wanted, wanted, size)
    assert [end - start for start, end in whole[:-1]] == [size] * (count - 1)


class Saving:
    """A model whose saves end at once, or, if it is slow, when they are waited for; it prunes as they end."""

    def __init__(self, slow: bool, saved: Callable[[], None] = lambda: None) -> None:
        self.slow, self.saved, self.kept = slow, saved, list[int]()
        self._saving: tuple[int, int] | None = None

    def save_training(self, path: Path, *, step: int, keep: int, **options: Any) -> None:
        self.wait_for_save()
        self._saving = step, keep
        if not self.slow:
            self.wait_for_save()

    def wait_for_save(self) -> None:
        if self._saving is not None:
            step, keep = self._saving
            self._saving, self.kept = None, [*self.kept, step][-keep:]
            self.saved()


def test_at_every_moment_the_models_have_a_checkpoint_of_one_step(run: Run) -> None:
    loop, critic = run(alternating(0), algorithm="ppo", keep=1), Saving(slow=True)
    common: list[set[int]] = []
    actor = Saving(slow=False, saved=lambda: common.append(set(actor.kept) & set(critic.kept)))
    loop.recipe.models = Models(actor, critic)
    for step in range(1, 5):
        loop._save(loop.options.out / "training", step)
    assert common == [set(), {1}, {2}, {3}]


def test_each_response_stands_behind_its_teachers_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hints = {"algorithm": "on-policy-distillation", "teacher.prompts": "hint", "samples": 2}
    loop = run(lambda *_: 1.0, **hints)
    prompts = [replace(prompt, teacher=[9, number]) for number, prompt in enumerate(loop.recipe.checked_run.prompts)]
    loop.recipe.checked_run, seen = replace(loop.recipe.checked_run, prompts=prompts), list[list[list[int]]]()

    def with_reference(models: Models, batch: Batch, options: TrainOptions, prompts: list[list[int]]) -> Batch:
        seen.append(prompts)
        return batch.with_fields(reference_log_probs=torch.zeros(batch.num_tokens))

    monkeypatch.setattr(Models, "with_reference", with_reference)
    experience = loop.recipe._collect(1)[0].experience
    loop.recipe._estimate(experience)
    assert [prompt.teacher for prompt in experience.prompts for _ in range(2)] == seen[0]
    for prompt, row, hint in zip(
        [prompt for prompt in experience.prompts for _ in range(2)], experience.batch.split(), seen[0], strict=True
    ):
        assert row[: len(prompt.tokens)].tolist() == prompt.tokens
        assert hint == [9, prompt.line - 1]


def test_the_screen_shows_what_a_chat_asks_and_the_files_the_whole_prompt(run: Run) -> None:
    loop = run(lambda *_: 1.0, algorithm="reinforce++", steps=1, show_every=1)
    system, asked = {"role": "system", "content": "answer"}, {"role": "user", "content": "abc"}
    parts = {"role": "user", "content": [{"type": "image", "path": "blue.png"}, {"type": "text", "text": "which"}]}
    rows = [{"messages": [system, asked, {"role": "tool", "content": "x"}]}, {"messages": [parts]}]
    loop.recipe.checked_run = replace(
        loop.recipe.checked_run, prompts=[Prompt([5, 6, 7, 8], row, number) for number, row in enumerate(rows, start=1)]
    )
    events: list[Any] = []
    loop.recipe.tell = events.append
    loop.run()
    (event,) = (event for event in events if "step" in event)
    shown = {sample["line"]: sample["prompt"] for sample in event["samples"]}
    assert shown == {1: "abc", 2: "(image) which"}
    assert event["sample"]["prompt"] in shown.values()
    assert event["sample"]["response"]
    samples = map(json.loads, (loop.options.out / "samples.jsonl").read_text().splitlines())
    assert {sample["prompt"] for sample in samples} == {"bcde"}
