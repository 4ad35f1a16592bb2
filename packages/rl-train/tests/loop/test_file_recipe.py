"""Recipes that learn from files: against transformers, in this process, and by the commands on ranks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rl_models import Actor, OptimizerOptions
from rl_models.api import WholeBatches
from rl_train.cli.commands import app
from rl_train.loop.checked_examples import check_examples
from rl_train.loop.file_objectives import OBJECTIVES
from rl_train.loop.file_recipe import FileRecipe
from rl_train.options.file_options import DistillOptions, DpoOptions, FileOptions, RewardModelOptions, SftOptions

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROWS: dict[str, list[dict[str, Any]]] = {
    "completions": [{"prompt": LETTERS[i : i + 2], "completion": LETTERS[i + 2 : i + 4 + i % 3]} for i in range(6)],
    "pairs": [
        {"prompt": LETTERS[i], "chosen": LETTERS[i + 1 : i + 4], "rejected": LETTERS[i : i + 2]} for i in range(6)
    ],
    "judged": [{"prompt": LETTERS[i], "completion": LETTERS[i + 1 : i + 4], "label": i % 2 == 0} for i in range(6)],
    "steps": [  # a step of a solution is right where it is "b"
        {"prompt": LETTERS[i], "completions": ["b", "y", "b"][i % 2 :], "labels": [True, False, True][i % 2 :]}
        for i in range(6)
    ],
    "labels": [{"text": LETTERS[i : i + 4], "label": i % 2} for i in range(6)],
}

Make = Callable[..., FileRecipe]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Make:
    """Make a recipe in this process, on one rank."""

    def recipe(kind: type[FileOptions], dataset: str, *, reference: bool = False, **options: Any) -> FileRecipe:
        given: dict[str, Any] = {"out": tmp_path / "run", "batch_size": 4, "device": "cpu", "learning_rate": 0.01}
        resolved = kind(model=model, dataset=tmp_path / "rows.jsonl", **given | options)
        checked = check_examples(resolved, ROWS[dataset])
        worker = OBJECTIVES[resolved.learned].kind.from_pretrained(
            model, device="cpu", lora=resolved.lora, optimizer=OptimizerOptions(learning_rate=0.01)
        )
        beside = WholeBatches(Actor.from_pretrained(model, device="cpu")) if reference else None
        return FileRecipe(lambda make: make(), lambda event: None, True, checked, WholeBatches(worker), beside)

    return recipe


def test_sft_has_the_loss_and_the_gradients_of_transformers(make: Make, model: Path) -> None:
    recipe = make(SftOptions, "completions")
    batch, values = recipe.collect(1)
    assert batch is not None
    assert values == {"tokens": batch.num_tokens, "learned_tokens": int(batch.mask.sum()), "passes": 4 / 6}
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    width = max(batch.lengths)
    ids, labels = torch.zeros(4, width, dtype=torch.int64), torch.full((4, width), -100)
    for row, tokens in enumerate(batch.split()):
        ids[row, : len(tokens)] = tokens
        labels[row, 3 : len(tokens)] = tokens[3:]  # behind the beginning of the text and two letters
    loss = expected(ids, labels=labels).loss  # causal: padding at the end changes nothing
    loss.backward()
    worker = recipe.model.worker  # type: ignore[attr-defined]
    objective = recipe.objective
    metrics = worker.forward_backward(
        batch, lambda inputs: objective.loss(inputs, recipe.options), aggregation=objective.aggregation
    )
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.copy_(parameter.grad)
    gradients = dict(worker.stream_weights())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_each_pass_reads_every_row_once(make: Make) -> None:
    recipe = make(SftOptions, "completions", batch_size=3)
    rows, states = [], []
    for step in range(1, 5):
        states.append(recipe.state(Path("training"), step))
        rows.append([tuple(row.tolist()) for row in recipe.collect(step)[0].split()])
    assert len({*rows[0], *rows[1]}) == len({*rows[2], *rows[3]}) == 6
    assert rows[:2] != rows[2:]
    recipe.resume(states[3], Path("training"), 3)
    assert [tuple(row.tolist()) for row in recipe.collect(4)[0].split()] == rows[3]


def test_an_evaluation_has_the_loss_of_its_rows(make: Make, tmp_path: Path) -> None:
    recipe = make(SftOptions, "completions", batch_size=6)
    recipe.checked_run.eval_examples.extend(recipe.checked_run.examples)
    batch, _ = recipe.collect(1)
    evaluated = recipe.evaluate(0)
    learned = recipe.update(batch)
    assert evaluated["eval/loss"] == pytest.approx(learned["loss"], rel=1e-5)
    assert evaluated["eval/entropy"] == pytest.approx(learned["entropy"], rel=1e-5)
    assert recipe.evaluate(1)["eval/loss"] < evaluated["eval/loss"]


@pytest.mark.parametrize(("loss", "start"), [("dpo", math.log(2)), ("ipo", 0.25 / 0.1**2), ("kto", 0.5)])
@pytest.mark.parametrize("adapters", [False, True])
def test_preferences_begin_at_the_reference(make: Make, loss: str, start: float, adapters: bool) -> None:
    """A reference is a copy of the policy, or the policy without its adapters, also after the policy has learned."""
    options = {"lora_rank": 2} if adapters else {}
    recipe = make(DpoOptions, "judged" if loss == "kto" else "pairs", reference=not adapters, loss=loss, **options)
    beginning = recipe.state(Path("training"), 0)
    batch, _ = recipe.collect(1)
    assert recipe.update(batch)["loss"] == pytest.approx(start, rel=1e-4)
    recipe.resume(beginning, Path("training"), 0)
    again, _ = recipe.collect(1)
    torch.testing.assert_close(again["reference_log_probs"], batch["reference_log_probs"], rtol=1e-5, atol=1e-5)
    assert recipe.update(again)["loss"] < start


def test_the_reference_point_of_kto_is_the_mean_ratio_behind_other_prompts(make: Make, model: Path) -> None:
    recipe = make(DpoOptions, "judged", reference=True, loss="kto")
    for _ in range(3):
        recipe.update(recipe.collect(1)[0])
    batch, _ = recipe.collect(1)
    pairs = zip(batch.split(), batch.split("mask"), strict=True)
    sequences = [(row.tolist(), mask.tolist().index(True)) for row, mask in pairs]
    ratios = []
    for number, (tokens, begin) in enumerate(sequences):
        prompt, of_prompt = sequences[(number + 1) % len(sequences)]
        row = prompt[:of_prompt] + tokens[begin:]
        sums = []
        for each in (recipe.model.worker, Actor.from_pretrained(model, device="cpu")):  # type: ignore[attr-defined]
            sums.append(float(each.log_probs(type(batch).from_sequences([row])).log_probs[of_prompt:].sum()))
        ratios.append(sums[0] - sums[1])
    assert float(batch["reference_point"][0]) == pytest.approx(max(0.0, sum(ratios) / len(ratios)), rel=1e-4, abs=1e-5)
    assert abs(sum(ratios)) > 0.01


def test_reward_models_score_the_ends_of_sequences(make: Make) -> None:
    pairs = make(RewardModelOptions, "pairs")
    batch, _ = pairs.collect(1)
    assert [int(mask.nonzero()) for mask in batch.split("mask")] == [length - 1 for length in batch.lengths]
    assert pairs.update(batch)["loss"] == pytest.approx(math.log(2))
    labels = make(RewardModelOptions, "labels", rows="labels")
    batch, _ = labels.collect(1)
    first = labels.checked_run.examples[0].sequences[0].tokens[1]  # of "a", whose row has the label 0
    assert [int(row[1] - first) % 2 for row in batch.split()] == [int(row[-1]) for row in batch.split("labels")]
    assert [row[:-1].tolist() for row in batch.split("labels")] == [[-100] * (n - 1) for n in batch.lengths]
    before = labels.update(batch)
    assert before["loss"] == pytest.approx(math.log(2))
    assert labels.update(batch)["loss"] < before["loss"]


def test_simpo_prefers_the_chosen_responses_and_has_no_reference(make: Make) -> None:
    recipe = make(DpoOptions, "pairs", loss="simpo", batch_size=6)
    batch, _ = recipe.collect(1)
    assert "reference_log_probs" not in batch.fields
    metrics = [recipe.update(batch) for _ in range(12)]
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 2
    means = batch.sum_by_sequence(recipe.model.log_probs(batch).log_probs) / batch.masked_counts
    chosen, rejected = means.view(6, 2).T
    assert bool((2 * (chosen - rejected) > 1).all()), "the margin of 1 between rewards, 2 times mean log-probs"


def test_a_process_reward_model_learns_the_label_of_each_step(make: Make) -> None:
    recipe = make(RewardModelOptions, "steps", rows="steps", batch_size=6)
    for step in range(1, 13):
        metrics = recipe.update(recipe.collect(step)[0])
    assert metrics["label_accuracy"] == pytest.approx(1)
    batch = recipe.objective.batch(recipe.checked_run.examples)
    values = recipe.model.values(batch)
    marked = batch["labels"] >= 0
    assert (values[marked] > 0).tolist() == [right for row in ROWS["steps"] for right in row["labels"]]


def test_a_policy_that_is_its_own_teacher_learns_nothing(make: Make, model: Path) -> None:
    recipe = make(DistillOptions, "completions", reference=True, teacher=model)
    recipe.model.load_teacher_head(model)
    batch, _ = recipe.collect(1)
    metrics = recipe.update(batch)
    assert metrics["loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["grad_norm"] < 1e-3


def test_the_model_with_the_lowest_evaluation_loss_is_kept(make: Make, tmp_path: Path) -> None:
    rows = tmp_path / "eval.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS["completions"]))
    options: dict[str, Any] = {"batch_size": 6, "eval_dataset": rows, "evaluation.keep_best": True}
    recipe = make(SftOptions, "completions", **options)
    said: list[str] = []
    recipe.tell = lambda event: said.append(event.get("message", ""))
    losses = [recipe.evaluate(0)["eval/loss"]]
    for step in (1, 2):
        recipe.update(recipe.collect(step)[0])
        losses.append(recipe.evaluate(step)["eval/loss"])
    state = recipe.state(tmp_path, 2)
    assert state["best"] == losses[2]
    again = make(SftOptions, "completions", out=tmp_path / "again", **options)
    again.resume(state, tmp_path, 2)
    again.tell = recipe.tell
    again.evaluate(3)  # the model before it learned
    assert [message for message in said if "saved in best" in message] == [
        f"step {step}: the best evaluation loss so far, {losses[step]:.3f}; saved in best" for step in (1, 2)
    ]
    weights = dict(recipe.model.worker.stream_weights())  # type: ignore[attr-defined]
    kept = dict(Actor.from_pretrained(tmp_path / "run" / "best", device="cpu").stream_weights())
    assert all(weights[name].equal(tensor) for name, tensor in kept.items())


def test_epochs_decide_the_steps_and_the_schedule(model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": model, "dataset": tmp_path / "r.jsonl", "out": tmp_path / "run", "device": "cpu"}
    given |= {"batch_size": 4, "optimizer.schedule.kind": "linear", "optimizer.schedule.warmup_steps": 2}
    for epochs, steps in ((1.5, 3), (2, 3), (200, 300)):
        checked = check_examples(SftOptions(**given, epochs=epochs), ROWS["completions"])
        assert checked.options_as_given is not None
        assert checked.options.steps == checked.options_as_given.steps == steps
        assert checked.options.optimizer.schedule.total_steps == steps
    with pytest.raises(ValueError, match="total_steps=1 must be more than warmup_steps=2"):
        check_examples(SftOptions(**given, epochs=0.5), ROWS["completions"])


def test_the_command_resumes_on_another_grid(make: Make, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS["completions"]))

    def call(recipe: str, *arguments: str) -> Any:
        given = [recipe, f"--model={model}", f"--dataset={rows}", f"--out={tmp_path / 'run'}", "--device=cpu"]
        return CliRunner().invoke(app, [*given, "--batch-size=4", "--learning-rate=0.01", *arguments])

    begun = call("sft", "--steps=2", "--save-every=1", f"--eval-dataset={rows}", "--eval-every=2")
    assert begun.exit_code == 0, begun.output
    assert "step 2/2  loss " in begun.output
    assert "  held-out " in begun.output
    refused = call("sft", "--steps=3", "--dims=tp=2", "--profile=3", "--profile-ranks=0,2")
    assert refused.exit_code == 2
    assert "profile=3 on profile_ranks=0,2 must name a step of 1..3 and ranks of 0..1" in refused.output
    resumed = call("sft", "--steps=3", "--dims=tp=2", "--profile=3", "--profile-ranks=0-1", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert sorted(file.name for file in (tmp_path / "run" / "profile").iterdir()) == [
        "profile.md", "rank-0.json.gz", "rank-1.json.gz",
    ]  # fmt: skip
    page = (tmp_path / "run" / "profile" / "profile.md").read_text()
    (seconds, waits, top), _ = re.findall(r"\| learning \| ([\d.]+) \| 0.000 \| ([\d.]+) \| (.*) \|", page)
    assert float(seconds) > float(waits) >= 0
    assert "::" in top
    assert "Step 3 by phase" in (tmp_path / "run" / "report.html").read_text()
    assert "going on after step 2" in resumed.output
    recipe = make(SftOptions, "completions", out=tmp_path / "other")
    losses = [recipe.update(recipe.collect(step)[0])["loss"] for step in (1, 2, 3)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(losses, rel=1e-4)
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 2]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "actor")
    assert f"sft of {model}, on {rows}" in (tmp_path / "run" / "report.html").read_text()
    other = call("dpo")
    assert other.exit_code == 2
    assert "holds a run of rl-train sft; choose another out for dpo" in other.output


def test_a_dry_run_shows_the_rows(model: Path, tmp_path: Path) -> None:
    rows = ROWS["completions"] + [{"prompt": LETTERS, "completion": LETTERS}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["sft", f"--model={model}", f"--dataset={tmp_path / 'rows.jsonl'}", f"--out={tmp_path / 'run'}"]
    given += ["--device=cpu", "--max-tokens=32", "--dry-run", "--json"]
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 2
    assert "line 7: 54 tokens are more than --max-tokens, 32; shorten the row" in refused.output
    result = CliRunner().invoke(app, [*given, "--data.long-prompts=drop"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["number_of_rows"], found["number_of_dropped_rows"], found["longest_sequence"]) == (6, 1, 8)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DpoOptions, {"margin": 2.0}, "margin=2.0 needs loss=simpo; give that, or leave margin out"),
        (
            DpoOptions,
            {"loss": "simpo", "reference": Path("r")},
            "reference=r needs another loss than simpo, which has no reference; give that, or leave reference out",
        ),
        (DistillOptions, {"teacher": Path("t"), "mixture": 0.5}, "divergence=forward_kl takes no mixture, got 0.5"),
        (SftOptions, {"epochs": 2, "steps": 9}, "epochs=2 and steps=9 both say how long the run is; give one"),
        (SftOptions, {"epochs": 2, "data.shuffle_buffer": 9}, "epochs=2 counts rows, which data"),
        (SftOptions, {"epochs": 1, "batch_size": 8, "profile": 5}, r"profile=5 on .* must name a step of 1\.\.1 "),
        (SftOptions, {"profile": 2, "profile_ranks": ""}, "profile=2 on profile_ranks= must name"),
        (SftOptions, {"engine.num_labels": 3}, "engine.num_labels=3 needs rl-train reward --rows labels or steps"),
        (SftOptions, {"profile_ranks": "1"}, "profile_ranks=1 needs profile, a step"),
        (SftOptions, {"evaluation.keep_best": True}, "evaluation.keep_best=True needs evaluation.dataset"),
        (SftOptions, {"eval_every": 3}, "evaluation.every=3 needs evaluation.dataset; give that, or leave evaluation"),
        (SftOptions, {"data.weights": "2"}, "data.weights=2 needs several sources, with a weight for each; give that"),
        (SftOptions, {"save_every": 0, "keep": 1}, "keep=1 needs save_every; give that, or leave keep out"),
        (RewardModelOptions, {"rows": "labels"}, "row.*3: the label 2 is not below 2, .* --engine.num-labels 3"),
        (SftOptions, {"dims": "tp=3"}, "not divisible by tp=3"),
        (SftOptions, {"backend": "magic"}, "magic"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, kind: type[FileOptions], options: dict[str, Any], message: str
) -> None:
    resolved = kind(model=model, dataset=tmp_path / "rows.jsonl", out=tmp_path / "run", device="cpu", **options)
    rows = {DpoOptions: ROWS["pairs"], RewardModelOptions: [{"text": "ab", "label": label} for label in range(4)]}
    with pytest.raises(ValueError, match=message):
        check_examples(resolved, rows.get(kind, ROWS["completions"]))


def test_a_number_of_epochs_has_an_end() -> None:
    with pytest.raises(ValueError, match="less than or equal to 1000000"):
        SftOptions(model=Path("m"), dataset=Path("d"), epochs=1e300)
