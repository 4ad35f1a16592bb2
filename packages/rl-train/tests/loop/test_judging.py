"""Models of a run that judge: a run on two ranks beside transformers, an evaluation, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.data.codec import TextCodec
from rl_train.loop.judging import _sampling, check_judges
from rl_train.options.options import TrainOptions
from rl_train.quickstart.task import LETTERS, make_checkpoint
from rl_train.rewards.judge import JUDGEMENTS
from rl_train.rewards.rubric import Rubric

TEMPLATE = "<s>{% for message in messages %}{{ message.content }}</s>{% endfor %}"
# The score is the last letter of a reply of two tokens.
VALUES: dict[str, Any] = {
    "prompt": "{{ response }}", "score": "([a-z])", "values": {x: n / 25 for n, x in enumerate(LETTERS)},
    "request": {"max_tokens": 2, "temperature": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the policy, with a chat template, whose replies end after half of the letters."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    make_checkpoint(folder, seed=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(5, 30, 2)]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def rubric(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, model: object, **values: Any) -> Path:
        (tmp_path / name).write_text(json.dumps(VALUES | {"model": str(model)} | values))
        return tmp_path / name

    return write


@cache
def loaded(model: Path) -> tuple[TextCodec, Any]:
    return TextCodec(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def reply(model: Path, response: str) -> str:
    """Return the reply about a response that transformers computes, unsharded and in fp32."""
    codec, weights = loaded(model)
    prompt = torch.tensor([codec.chat([{"role": "user", "content": response}], None)])
    with torch.no_grad():
        tokens = weights.generate(prompt, max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(prompt))
    return codec.decode(tokens[0, prompt.shape[1] :].tolist())


def score(text: str) -> float:
    letters = [letter for letter in text if letter in LETTERS]
    return float(VALUES["values"][letters[-1]]) if letters else 0.0


def test_models_of_a_run_judge_as_transformers_does(
    chat_model: Path, judge: Path, prompts: Path, rubric: Callable[..., Path], tmp_path: Path
) -> None:
    """On two ranks: another checkpoint, and the policy without its adapters, also after it has learned."""
    rewards = f"other=judge:{rubric('other.yaml', judge)},base=judge:{rubric('base.yaml', 'reference')}@0"
    command = ["train", "--model", chat_model, "--prompts", prompts, "--reward", rewards, "--rewards.errors", "zero"]
    command += ["--steps", 2, "--prompts-per-step", 6, "--samples", 3, "--max-new-tokens", 6, "--max-tokens", 40]
    command += [
        "--learning-rate",
        0.05,
        "--engine.lora.rank",
        4,
        "--dims",
        "dp=2",
        "--save-every",
        0,
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, [*map(str, command), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2}
    replies = {sample["response"]: reply(judge, sample["response"]) for sample in samples}
    assert [sample["reward"] for sample in samples] == pytest.approx([score(replies[x["response"]]) for x in samples])
    assert len({score(text) for text in replies.values()}) > 2, "the judge tells responses apart"
    judgements = [json.loads(line) for line in (tmp_path / "run" / JUDGEMENTS).read_text().splitlines()]
    kept = Counter(judgement["reply"] for judgement in judgements)
    expected = Counter(reply(model, text) for text in {s["response"] for s in samples} for model in (judge, chat_model))
    assert expected <= kept
    for step in steps:
        assert step["judge_calls"] + step["judge_cached"] == 2 * 18
        assert step["judge_tokens"] > 3 * step["judge_calls"]
        assert step["judge_seconds"] > 0
    assert sum(step["judge_calls"] for step in steps) == len(judgements) == len({x["request"] for x in judgements})
    assert sum(step["reward_errors"] for step in steps) == sum(step["judge_unreadable"] for step in steps)


def options(model: Path, file: Path, **values: Any) -> TrainOptions:
    given = {"model": model, "prompts": Path("p"), "reward": f"judge:{file}", "out": Path("run"), "device": "cpu"}
    return TrainOptions(**given | values)  # type: ignore[arg-type]


def test_replies_are_drawn_with_the_seed_of_the_run_or_of_the_rubric(judge: Path, rubric: Callable[..., Path]) -> None:
    for request, seed in (({"max_tokens": 2}, 7), ({"max_tokens": 2, "seed": 3}, 3)):
        sampling = _sampling(Rubric.read(rubric("a.yaml", judge, request=request)), judge, 7)
        assert (sampling.seed, sampling.max_new_tokens, sampling.log_probs) == (seed, 2, False)
        assert sampling.stop_ids == [2, *range(5, 30, 2)]


def test_judges_that_a_run_does_not_have_are_refused(
    model: Path, chat_model: Path, hybrid: Path, judge: Path, rubric: Callable[..., Path], tmp_path: Path
) -> None:
    check_judges(options(model, rubric("a.yaml", judge)))
    check_judges(options(chat_model, rubric("a.yaml", "reference"), **{"objective.kl_coefficient": 0.1}))
    for name, changes, error in (
        ("none", {}, "none"),
        ("reference", {}, "reward a: model='reference' needs a reference on the policy's ranks, and the run has none"),
        (model, {}, rf"reward a: {model} has no chat template, by which a judge is asked"),
        (judge, {"request": {"max_tokens": 64}}, "reward a: max_tokens=64 of a reply must be less than 64"),
        (judge, {"request": {"max_tokens": 2, "top_p": 7}}, r"reward a: top_p=7 must lie in \(0, 1\]"),
        (
            judge,
            {"request": {"max_tokens": 2, "stop": "x"}},
            "request: a model of the run takes max_tokens, .*not stop",
        ),
        (judge, {"attempts": 3}, "attempts needs url, the server"),
        (judge, {"request": {"max_tokens": 2, "max_completion_tokens": 3}}, "request: max_tokens and max_compl.* same"),
    ):
        with pytest.raises(ValueError, match=error):
            check_judges(options(chat_model, rubric("a.yaml", name, **changes)))
    with pytest.raises(ValueError, match="num_attention_heads=4 is not divisible by tp=3"):
        check_judges(options(chat_model, rubric("a.yaml", judge), dims="tp=3"))
    for policy, name in ((chat_model, hybrid), (hybrid, "reference")):
        changes = {"objective.kl_coefficient": 0.1, "backend": "transformers"}
        with pytest.raises(ValueError, match=f"keeps no states of the recurrent layers of {hybrid}"):
            check_judges(options(policy, rubric("a.yaml", name), **changes))


def test_an_evaluation_has_judges_and_its_questions_a_limit(
    chat_model: Path, judge: Path, prompts: Path, rubric: Callable[..., Path], tmp_path: Path
) -> None:
    """Some questions are too long: their responses count as failures, and the others are judged."""
    file, out = rubric("a.yaml", judge, prompt="{{ prompt }}{{ 'z' * 44 * (prompt == 'c') }}"), tmp_path / "out.jsonl"
    command = ["evaluate", chat_model, "--prompts", prompts, "--reward", f"judge:{file}", "--rewards.errors", "zero"]
    command += ["--max-new-tokens", 4, "--max-tokens", 40, "--device", "cpu", "--out", out, "--json"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [0.0 if x["prompt"] == "c" else score(reply(judge, x["prompt"])) for x in records]
    assert [record["reward"] for record in records] == pytest.approx(expected)
    assert "a question of 47 tokens is longer than 38, the room beside the reply" in result.stderr
