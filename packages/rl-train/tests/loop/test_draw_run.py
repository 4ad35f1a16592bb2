"""`rl-train evaluate` and `generate`: the metrics and the records of responses, and a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rl_models import Actor
from rl_train.cli.commands import app
from rl_train.data.codec import TextCodec
from rl_train.loop.draw_run import chat
from rl_train.options.draw_options import EvaluateOptions, GenerateOptions
from rl_train.options.options import TrainOptions

TEMPLATE = "<s>{% for message in messages %}{{ message.content }}</s>{% endfor %}"


def call(*arguments: object, max_new_tokens: int = 4) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments), "--device=cpu", f"--max-new-tokens={max_new_tokens}"])


def test_an_evaluation_draws_and_scores_every_response(model: Path, prompts: Path, tmp_path: Path) -> None:
    out, task = tmp_path / "responses.jsonl", "rl_train.quickstart.task:reward"
    arguments = ["--reward", task, "--samples=4", "--dims=dp=2", "--out", out, "--json"]
    result = call("evaluate", model, "--prompts", prompts, *arguments)
    assert result.exit_code == 0, result.output
    values, records = json.loads(result.stdout), [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["line"] for record in records] == [line for line in range(1, 13) for _ in range(4)]
    rewards = torch.tensor([record["reward"] for record in records]).view(12, 4)
    assert values["eval/reward"] == pytest.approx(float(rewards.mean()))
    assert values["eval/pass@4"] == pytest.approx(float(rewards.amax(1).mean()))
    assert len({record["response"] for record in records}) > 12, "responses are drawn at temperature 1"
    refused = call("generate", model, "--prompts", prompts, "--out", prompts)
    assert refused.exit_code == 2
    assert "an input; choose another file" in refused.output


def test_a_model_and_prompts_at_urls(
    model: Path, prompts: Path, tmp_path: Path, upload: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    upload(model, "memory://bucket/model")
    upload(prompts.parent, "memory://bucket")
    local = call("generate", model, "--prompts", prompts)
    assert local.exit_code == 0, local.output
    result = call("generate", "memory://bucket/model", "--prompts", f"memory://bucket/{prompts.name}")
    assert result.stdout == local.stdout, result.output


@pytest.mark.slow
def test_an_evaluation_runs_an_environment(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)  # of the module `talks`
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"messages": "c", "turns": turns}) + "\n" for turns in (1, 3)))
    size = json.loads((chat_model / "config.json").read_text())["vocab_size"]
    stops = ",".join(map(str, range(size)))  # each answer is one token
    arguments = ["--environment", "talks:Talk", "--samples=2", "--stop-ids", stops, "--out", out, "--json"]
    result = call("evaluate", chat_model, "--prompts", rows, *arguments, max_new_tokens=24)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["line"], record["reward"]) for record in records] == [(1, 1), (1, 1), (2, 3), (2, 3)]
    values = json.loads(result.stdout)
    assert (values["eval/reward"], values["eval/turns"]) == (2, 2)


def test_generate_writes_what_the_model_draws(model: Path, prompts: Path) -> None:
    result = call("generate", model, "--prompts", prompts, "--temperature=0", "--stop-ids=")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    codec, actor = TextCodec(model), Actor.from_pretrained(model, device="cpu")
    batch = actor.generate([codec.encode(letter) for letter in "abcdefghijkl"], max_new_tokens=4, temperature=0.0)
    assert [record["response"] for record in records] == [codec.decode(row.tolist()) for row in batch.responses()]
    assert "reward" not in records[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "MODEL"], "evaluate needs a reward; give --reward or --environment"),
        (["evaluate", "MODEL", "--environment", "talks:Talk"], "evaluate needs prompts; give --prompts, or an --env"),
        (["sft", "--ray"], "--ray is an option of train, not of sft"),
        (["evaluate", "MODEL", "--rewrd", "x"], "Possible options: --reward|did you mean --reward"),
        (["generate", "MODEL", "--prompts", "none.jsonl"], "none.jsonl does not exist"),
        (["generate", "MODEL", "--dims", "tp=2"], "a chat runs on one rank"),
        (["generate", "MODEL", "--prompts", "p.jsonl", "--stop-ids", "x"], "stop_ids='x' must be numbers with commas"),
        (["generate", "MODEL", "--rollouts.staleness", "1"], "staleness is an option of train, not of generate"),
        (["evaluate", "MODEL", "--rewards.overlong-buffer", "9"], "buffer is an option of train, not of evaluate"),
        (["generate", "MODEL", "--engine.share-prefixes"], "prefixes is an option of train, not of generate"),
        (["generate", "MODEL", "--prompts", "p.jsonl", "--samples", "2", "--temperature", "0"], "are equal at --temp"),
        (["generate"], "Missing argument"),
    ],
)
def test_mistakes_are_named(model: Path, arguments: list[str], message: str) -> None:
    result = call(*(argument.replace("MODEL", str(model)) for argument in arguments))
    assert result.exit_code == 2
    assert re.search(message, " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split()))


def test_a_chat_goes_on_with_its_answers_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "data"))
    from chat_families import CHATML, save_tokenizer

    save_tokenizer(tmp_path, CHATML)
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, max_position_embeddings=256, **sizes)).save_pretrained(tmp_path)
    options = GenerateOptions(model=tmp_path, device="cpu", max_new_tokens=5, temperature=0.0)
    pieces: list[str] = []
    answers = list(chat(options, iter(["Hi", "And?"]), pieces.append))
    codec, actor = TextCodec(tmp_path), Actor.from_pretrained(tmp_path, device="cpu")
    messages: list[dict[str, str]] = []
    for question, answer in zip(["Hi", "And?"], answers, strict=True):
        messages.append({"role": "user", "content": question})
        whole = actor.generate([codec.chat(messages, None)], max_new_tokens=5, temperature=0.0)
        assert answer == codec.decode(whole.responses()[0].tolist())
        messages.append({"role": "assistant", "content": answer})
    assert "".join(pieces) == "".join(answers)
    assert len([piece for piece in pieces if piece]) > len(answers)


def test_options_mean_the_same_as_in_training(tmp_path: Path) -> None:
    names = EvaluateOptions.names() - {"out"}
    assert names <= TrainOptions.names() | {"temperature", "top_p", "max_new_tokens"}
    options = EvaluateOptions(
        model=tmp_path, prompts=tmp_path / "p", reward="r:f", samples=8, temperature=0.5, dtype="bfloat16", seed=3
    )
    run = options.train_options(tmp_path / "run", reward="r:f")
    assert (run.evaluation.samples, run.evaluation.temperature, run.seed) == (8, 0.5, 3)
    assert run.engine.dtype is torch.bfloat16
    assert run.evaluation.prompts == run.prompts == tmp_path / "p"
