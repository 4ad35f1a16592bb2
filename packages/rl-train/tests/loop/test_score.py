"""`rl-train score`: the same numbers as transformers, in the order of the data, and clear words for a bad line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForTokenClassification,
)
from typer.testing import CliRunner

from parallel_layers import ParallelDims
from rl_train.cli.commands import app
from rl_train.data.prompts import read_prompts
from rl_train.loop.score import ScoreOptions, score
from rl_train.quickstart.task import MODEL, make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "actor"
    make_checkpoint(path, seed=0)
    return path


@pytest.fixture(scope="session")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "critic"
    LlamaForTokenClassification(LlamaConfig(**MODEL, num_labels=1)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "grid",
    [
        "--tp=2",
        *(pytest.param(f"--dims={dims}", marks=pytest.mark.slow) for dims in ("dp=2", "pp=2", "dp=2,pp=2")),
    ],
)
def test_scores_equal_transformers_in_the_order_of_the_data(
    model: Path, critic: Path, tmp_path: Path, grid: str
) -> None:
    data = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [{"tokens": [1, 5, 9, 2]}, {"text": "hello"}, {"tokens": [7]}]
    data.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    out = tmp_path / "scores.jsonl"
    arguments = ["score", "--model", str(model), "--data", str(data), "--critic", str(critic), grid]
    options = ["--out", str(out), "--device", "cpu", "--temperature", "0.5", "--max-tokens", "7"]
    result = CliRunner().invoke(app, arguments + options)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert records[1]["tokens"] == [1, 11, 8, 15, 15, 18]
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    value_reference = LlamaForTokenClassification.from_pretrained(critic).eval()
    for record in records:
        tokens = torch.tensor(record["tokens"])
        with torch.no_grad():
            predicted = (reference(tokens[None]).logits[0] / 0.5).log_softmax(-1)
            values = value_reference(tokens[None]).logits[0, :, 0]
        log_probs = predicted[:-1].gather(-1, tokens[1:, None])[:, 0]
        entropy = -(predicted.exp() * predicted).sum(-1)[:-1]
        for name, expected in (("log_probs", log_probs), ("entropy", entropy), ("values", values[:-1])):
            assert record[name][0] == 0
            torch.testing.assert_close(torch.tensor(record[name][1:]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", 'line 2: expected an object with one of "tokens" .*, "text" .* and "messages"'),
        ('{"tokens": [1], "text": "a"}', "line 2: expected an object with one of"),
        ('{"tokens": [1, 2.5]}', 'line 2: "tokens" must be a list of integers'),
        ('{"tokens": [true]}', 'line 2: "tokens" must be a list of integers'),
        ('{"tokens": []}', "line 2: no tokens"),
        ('{"tokens": [1, 30, -1]}', r"line 2: token ids \[30, -1\] are outside the vocabulary of 30"),
        ('{"text": 3}', 'line 2: "text" must be a string, got int'),
        (
            '{"text": "ab\\ud800c"}',
            r"""line 2: "text": character 2 of the text, '\\ud800', is half of a surrogate pair; remove it""",
        ),
        ("[" * 10**5 + "]" * 10**5, "line 2: not valid JSON: lists and objects are nested too deeply"),
        (b'{"text": "\xe9"}', "line 2: not valid JSON: byte 10 is not UTF-8"),
        ('{"tokens": [1, 2, 3, 4, 5, 6]}', "line 2: 6 tokens are more than --max-tokens 5"),
    ],
)
def test_a_bad_line_is_named(model: Path, tmp_path: Path, line: str | bytes, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'{"tokens": [1, 2]}\n' + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(data, model, max_tokens=5)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("ab", [1, 4, 5, 2]), ("<s>ab", [1, 4, 5, 2]), ("ab</s>", [1, 4, 5, 2]), ("<s>a<s>b</s>", [1, 4, 1, 5, 2])],
)
def test_a_rendered_chat_text_gets_no_second_token_of_its_begin_or_end(
    model: Path, tmp_path: Path, text: str, tokens: list[int]
) -> None:
    shutil.copy(model / "config.json", tmp_path)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}))
    assert [prompt.tokens for prompt in read_prompts(tmp_path / "data.jsonl", tmp_path, 9)] == [tokens]


def test_text_needs_a_tokenizer_that_can_be_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r'line 1: "text" needs .*tokenizer.json, which does not exist; give "tokens"'):
        read_prompts(tmp_path / "data.jsonl", tmp_path, 9)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"line 1: .*tokenizer.json cannot be read as a tokenizer: "):
        read_prompts(tmp_path / "data.jsonl", tmp_path, 9)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_the_end_of_a_line_ends_it(model: Path, tmp_path: Path, end: str) -> None:
    """Lines end at newlines only; a text may contain the other separators of Unicode."""
    rows = [{"text": "a", "label": "first\u2028second\x85"}, {"text": "b"}]
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows) + end
    (tmp_path / "data.jsonl").write_bytes(text.encode())
    prompts = read_prompts(tmp_path / "data.jsonl", model, 9)
    assert [(prompt.tokens, prompt.row) for prompt in prompts] == [([1, 4], rows[0]), ([1, 5], rows[1])]
    assert [prompt.line for prompt in prompts] == [1, 2]


def test_prompts_are_for_models_of_any_family(tmp_path: Path) -> None:
    # Gemma 2 runs on the transformers backend alone, a model with a vision tower has its text's config inside.
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [99]}\n')
    for config in ({"architectures": ["Gemma2ForCausalLM"], "vocab_size": 100}, {"text_config": {"vocab_size": 100}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert [prompt.tokens for prompt in read_prompts(tmp_path / "prompts.jsonl", tmp_path, 9)] == [[99]]
    for text, message in (
        ("{", "is not valid JSON: "),
        ("[]", "holds list, not a JSON object"),
        ("{}", "states no vocab_size"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config.json {message}"):
            read_prompts(tmp_path / "prompts.jsonl", tmp_path, 9)


def test_mistakes_are_one_line(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    runner = CliRunner()
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, message in (
        (["--model", str(empty), "--data", str(data)], "is no checkpoint folder (it has no config.json)"),
        (["--model", str(model), "--data", str(tmp_path / "none.jsonl")], "none.jsonl does not exist; give a"),
        (
            ["--model", str(model), "--data", str(data), "--critic", str(empty), "--device", "cpu"],
            "no checkpoint folder",
        ),
        (["--model", str(model), "--data", str(data), "--dims", "tp=3"], "is not divisible by"),
        (["--model", str(model), "--data", str(data), "--tp=2", "--dims=pp=2"], "both state the grid"),
    ):
        out = tmp_path / "out.jsonl"
        result = runner.invoke(app, ["score", *arguments, "--out", str(out), "--device", "cpu"])
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "Traceback" not in result.stderr
        assert not out.exists()
    for out, message in ((empty, "must be a file in a folder"), (empty / "a" / "b", "must be a file in a folder")):
        arguments = ["score", "--model", str(model), "--data", str(data), "--out", str(out)]
        assert message in runner.invoke(app, arguments).stderr
    data.write_text("\n")
    result = runner.invoke(app, ["score", "--model", str(model), "--data", str(data)])
    assert "has no lines" in result.stderr


@pytest.mark.parametrize(
    ("model_is", "dims", "message"),
    [
        ("whole", "tp=64", "num_attention_heads=4 is not divisible by tp=64"),
        ("whole", "pp=64", "is fewer than the 64 chunks"),
        ("whole", "ep=2,tp=2", "ep=2 is for a mixture of experts"),
        ("without weights", "", "has neither model.safetensors nor"),
        ("of other sizes", "", "the sizes in config.json and the files disagree"),
        ("cut off", "", "model.safetensors"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_any_rank_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_is: str, dims: str, message: str
) -> None:
    monkeypatch.setattr("rl_train.loop.score.run_on_ranks", lambda *args, **kwargs: pytest.fail("ranks were started"))
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    if model_is == "without weights":
        (broken / "model.safetensors").unlink()
    if model_is == "of other sizes":
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    if model_is == "cut off":
        whole = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=message):
        score(ScoreOptions(broken, dims=ParallelDims.parse(dims), device="cpu"), [[1, 2]], lambda record: None)


def test_scores_that_no_grid_and_batch_changes(model: Path, critic: Path, tmp_path: Path) -> None:
    """The same bytes from one rank with one sequence at a time and from two with all of them."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"tokens": list(range(1, n))}) for n in (5, 2, 9, 14)) + "\n")
    found = []
    for grid, max_tokens in (("tp=1", 14), ("tp=2", 64)):
        out = tmp_path / f"{grid}.jsonl"
        arguments = ["score", "--model", str(model), "--data", str(data), "--critic", str(critic), "--dims", grid]
        options = ["--out", str(out), "--device", "cpu", "--max-tokens", str(max_tokens)]
        result = CliRunner().invoke(app, [*arguments, *options, "--tp-invariant", "--deterministic"])
        assert result.exit_code == 0, result.output
        found.append(out.read_bytes())
    assert found[0] == found[1]


SIZES: dict[str, Any] = {**MODEL, "num_hidden_layers": 4, "initializer_range": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES: dict[str, Any] = {
    "dense": (LlamaConfig(**SIZES), LlamaForCausalLM, LlamaForTokenClassification),
    "moe": (Qwen3MoeConfig(**SIZES, **EXPERTS), Qwen3MoeForCausalLM, Qwen3MoeForTokenClassification),
}


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[str], list[dict[str, Any]]]]:
    """Return the arguments to score a family, and the records of a single rank."""

    @cache
    def score_once(family: str) -> tuple[list[str], list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp(family)
        config, actor, critic = FAMILIES[family]
        torch.manual_seed(1)
        actor(config).save_pretrained(folder / "actor")
        config.num_labels = 1
        critic(config).save_pretrained(folder / "critic")
        draw = random.Random(2)
        rows = [[draw.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in (9, 1, 21, 2, 14, 5)]
        (folder / "data.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
        given = {"model": "actor", "critic": "critic", "data": "data.jsonl"}
        arguments = [f"--{option}={folder / name}" for option, name in given.items()]
        return arguments, scored(arguments, "", folder / "one.jsonl")

    return score_once


def scored(arguments: list[str], dims: str, out: Path, *more: str) -> list[dict[str, Any]]:
    """The records of `rl-train score` on a grid."""
    # Room for the longest alone: several passes, and sequences that share one.
    options = [f"--dims={dims}", f"--out={out}", "--device=cpu", "--max-tokens=24", "--temperature=0.7"]
    result = CliRunner().invoke(app, ["score", *arguments, *options, *more])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("dense", "dp=2,cp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("moe", "dp=2,ep=2"),
                ("dense", "tp=2,pp=2"),
                ("dense", "cp=2,tp=2"),
                ("dense", "pp=2,cp=2"),
                ("dense", "cp=2"),
                ("moe", "tp=2,ep=2"),
                ("moe", "cp=2,ep=2"),
                ("moe", "pp=2,dp=2,ep=2"),
                ("moe", "tp=2,pp=2"),
            )
        ),
    ],
)
def test_every_number_is_that_of_one_rank(
    on_one_rank: Callable[[str], tuple[list[str], list[dict[str, Any]]]], tmp_path: Path, family: str, dims: str
) -> None:
    arguments, expected = on_one_rank(family)
    found = scored(arguments, dims, tmp_path / "scores.jsonl")
    assert len(found) == len(expected) == 6
    for one, other in zip(expected, found, strict=True):
        assert list(other) == ["index", "tokens", "log_probs", "entropy", "values"]
        assert (one["index"], one["tokens"]) == (other["index"], other["tokens"])
        for name in ("log_probs", "entropy", "values"):
            torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(one[name]), rtol=0, atol=1e-5)


def test_the_dtype_of_the_weights_is_the_users(
    on_one_rank: Callable[[str], tuple[list[str], list[dict[str, Any]]]], tmp_path: Path
) -> None:
    """bf16 on request: close to fp32, and not the same; a type that no model has is refused."""
    arguments, stored = on_one_rank("dense")
    for one, other in zip(stored, scored(arguments, "", tmp_path / "half.jsonl", "--dtype=bfloat16"), strict=True):
        difference = (torch.tensor(one["log_probs"]) - torch.tensor(other["log_probs"])).abs()
        assert difference.max() < 0.5
        assert len(one["tokens"]) == 1 or difference.max() > 0
    refused = CliRunner().invoke(app, ["score", *arguments, "--dtype=int8"])
    assert refused.exit_code == 2
    assert "dtype='int8' must be float32 or bfloat16" in refused.stderr
