"""A run refuses these mistakes before anything starts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from ckpt import layout_for, load_hf, save_hf
from parallel_layers.inference import PagedKVCache
from parallel_models import CacheOptions, SamplingOptions
from rl_models import Actor
from rl_train.cli.commands import app
from rl_train.data.codec import end_of_text
from rl_train.data.prompts import Prompt
from rl_train.loop.checked_run import check_run
from rl_train.loop.folder import check_folder, write_options
from rl_train.loop.run import _in_process
from rl_train.options.options import TrainOptions


@pytest.mark.usefixtures("hybrid")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reference": Path("elsewhere")},
            "reference=elsewhere needs a kl_coefficient above 0, or algorithm=on-policy-distillation; give that",
        ),
        (
            {"reference": Path("with-other-tokens"), "algorithm": "on-policy-distillation"},
            r"differ in 1 tokens, such as 'a' \(ids None and 4\); take a teacher with the policy's tokenizer",
        ),
        (
            {"reference": Path("with-no-heads"), "kl_coefficient": 1.0},
            "with-no-heads/config.json: the config's num_att",
        ),
        ({"engine.pipeline.virtual_stages": 2}, "^virtual_stages=2 needs pp > 1; leave it out, or give dims with pp"),
        ({"dims": "dp=2,replicate=2", "backend": "megatron"}, "backend='megatron' does not offer replicate=2"),
        ({"engine.sequence_parallel": True}, "sequence_parallel=True needs tp > 1"),
        (
            {"rollouts.cache_gib": 1e-5},
            "a sequence of 258 tokens takes 5 blocks .* and 0 fit into .* give more memory by cache_gib",
        ),
        (
            {"rollouts.devices": "cpu,cpu,cpu", "rollouts.dims": "tp=3"},
            "^the engines of rollouts.devices=cpu,cpu,cpu, rollouts.dims=tp=3: num_attention_heads=4 is not divisible",
        ),
        (
            {"rollouts.devices": "cpu", "rollouts.drafts": 1},
            "^the engines of rollouts.devices=cpu, rollouts.dims=tp=1: drafts=1 needs multi-token-prediction layers",
        ),
        (
            {"engine.router_losses.balance": 0.1},
            r"router_losses=.*balance=0.1.* is for a mixture of experts, which llama is not",
        ),
        ({"engine.mtp_loss_scaling_factor": 0.1}, "trains multi-token-prediction layers, and the checkpoint has none"),
        ({"out": Path("file") / "run"}, "file is a file, so file/run cannot be a folder"),
        ({"model": Path("with-a-broken-end")}, "with-a-broken-end/generation_config.json is not valid JSON: "),
        ({"model": Path("without-weights")}, "has neither model.safetensors nor"),
        ({"model": Path("in-float16")}, "in-float16 is stored in float16, which only backend=megatron trains"),
        ({"model": Path("in-float16"), "backend": "transformers"}, "in-float16 is stored in float16"),
        ({"model": Path("with-no-heads")}, "with-no-heads/config.json: the config's num_attention_heads=0 must"),
        (
            {"model": Path("hybrid"), "backend": "transformers"},
            "backend=transformers keeps no states of the recurrent layers of hybrid .*; leave backend out, or give rol",
        ),
        ({"model": Path("hybrid"), "backend": "megatron"}, "backend=megatron keeps no states of the recurrent layers"),
        ({"objective.router_replay": True}, "router_replay=True is for a mixture of experts"),
        ({"rollouts": "vllm", "rollouts.routing": True}, "rollouts.routing=True is for a mixture of experts"),
        ({"engine.float8": "current"}, "float8=current needs Transformer Engine, which is not installed: pip install"),
        (
            {"engine.float8": "current", "backend": "transformers"},
            "backend='transformers' does not offer float8='current'",
        ),
        ({"optimizer.offload": True, "backend": "megatron"}, "backend='megatron' has no optimizer with offload=True"),
        ({"lora_rank": 4, "optimizer": "muon"}, "leave out lora or algorithm='muon'"),
        ({"max_tokens": 257}, "more than --max-tokens less --max-new-tokens, .*; give a larger --max-tokens, or"),
        (
            {"rollouts": "vllm", "rollouts.quantization": "fp8"},
            r"quantization='fp8' is not for .*q_proj\.weight is \[64, 64\], and vLLM needs a multiple of 128",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(
    model: Path,
    prompts: Path,
    folder_of_rewards: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("rl_train.loop.checked_run.require_vllm", lambda: None)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    shutil.copytree(model, "without-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(model, "with-a-broken-end")
    Path("with-a-broken-end/generation_config.json").write_text("{")
    shutil.copytree(model, "with-no-heads")
    config = json.loads(Path("with-no-heads/config.json").read_text())
    Path("with-no-heads/config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    monkeypatch.setattr("rl_train.loop.checked_run.find_spec", lambda name: None)
    tokenizer = Path(shutil.copytree(model, "with-other-tokens")) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a":', '"A":'))
    layout = layout_for(model)
    save_hf("in-float16", load_hf(model, layout), layout, dtype=torch.float16, copy_from=model)
    given: dict[str, Any] = {"model": model, "prompts": prompts, "reward": "rewards:alphabet", "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        check_run(TrainOptions(**given | options))


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"rollouts.max_sequences": 3},
        pytest.param({"rollouts.cache_gib": 2e-3}, marks=pytest.mark.slow),
        {"rollouts.float8_cache": True},
        pytest.param({"eval": 99}, marks=pytest.mark.slow),
    ],
)
def test_the_planned_cache_is_that_of_the_run(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The bytes that a step, or an evaluation with more prompts, allocates by the options of the run."""
    if number := options.pop("eval", 0):
        options["eval_prompts"] = tmp_path / "eval.jsonl"
        options["eval_prompts"].write_text('{"tokens": [3]}\n' * number)
    given: dict[str, Any] = {"prompts_per_step": 4, "samples": 2, "max_new_tokens": 70, "device": "cpu", "stop_ids": ""}
    checked_run = check_run(TrainOptions(model=model, prompts=prompts, reward="rewards:alphabet", **given | options))
    built: list[PagedKVCache] = []
    build = CacheOptions.build
    monkeypatch.setattr(CacheOptions, "build", lambda *given: built.extend(found := build(*given)) or found)
    engine = _in_process(Actor.from_pretrained(model, device="cpu"), checked_run.options)
    longest = max(checked_run.prompts, key=lambda prompt: len(prompt.tokens)).tokens
    engine.generate([longest] * max(4, number), SamplingOptions(70, n=1 if number else 2))
    assert checked_run.cache == sum(cache.block_bytes * (cache.num_blocks + 1) for cache in built)
    assert checked_run.describe()["cache_bytes"] == checked_run.cache


@pytest.mark.usefixtures("folder_of_rewards")
def test_engines_apart_have_the_cache_of_their_own_grid(model: Path, prompts: Path) -> None:
    """A rank of tp 2 has half of the heads; the policy, which does not draw, needs no room."""

    def cache(dims: str, gib: float | None) -> int | None:
        apart = {"rollouts.devices": "cpu,cpu", "rollouts.dims": dims, "rollouts.cache_gib": gib, "device": "cpu"}
        options = TrainOptions(model=model, prompts=prompts, reward="rewards:alphabet", max_new_tokens=20, **apart)
        return check_run(options).cache

    whole, half = (cache(dims, None) for dims in ("tp=1", "tp=2"))
    assert whole == 2 * (half or 0) > 0
    two_blocks = 2 * 64 * 2 * 2 * 4 * 16  # tokens, layers, keys and values, bytes, the size of the only head
    assert cache("tp=2", two_blocks / 2**30) == two_blocks
    with pytest.raises(ValueError, match=r"^the engines of .* a sequence of 22 tokens takes 1 blocks"):
        cache("tp=1", two_blocks / 2**30)


def test_long_prompts_are_dropped_and_counted(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"text": "{"a" * length}"}}\n' for length in (3, 90, 7, 63, 64)))
    given: dict[str, Any] = {
        "model": model,
        "prompts": file,
        "reward": "rl_train.quickstart.task:reward",
        "device": "cpu",
        "out": tmp_path / "run",
    }
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: 91 tokens are more than the model's 64 positions"):
        check_run(TrainOptions(**given))
    checked_run = check_run(TrainOptions(**given, **{"data.long_prompts": "drop"}, eval_prompts=file))
    assert [prompt.line for prompt in checked_run.prompts] == [1, 3, 4]
    expected = {"number_of_prompts": 3, "number_of_eval_prompts": 3, "number_of_dropped_prompts": 4}
    assert expected.items() <= checked_run.describe().items()
    shorter = check_run(TrainOptions(**given, **{"data.long_prompts": "drop"}, max_tokens=14, max_new_tokens=6))
    assert [prompt.line for prompt in shorter.prompts] == [1, 3]
    with pytest.raises(ValueError, match=r"prompts\.jsonl: all 5 rows have too many tokens; nothing is left"):
        check_run(TrainOptions(**given, **{"data.long_prompts": "drop"}, max_tokens=7, max_new_tokens=6))


def test_a_summary_has_the_options_that_are_given(model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": model, "prompts": tmp_path / "p", "reward": "math:fsum", "out": tmp_path / "run"}
    options = TrainOptions(**given, algorithm="reinforce++", steps=1, prompts_per_step=1, seed=5)
    summary = check_run(options, [{"text": "a"}] * 4, []).summary()
    shown = {"steps": 1, "updates_per_step": 1, "passes_over_prompts": 0.25, "reward": "math:fsum"}
    assert shown.items() <= summary.items()
    assert summary["further options"] == "seed=5 prompts_per_step=1"


def test_longrope_bounds_prompts_with_their_responses(model: Path, prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "longrope"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {"rope_type": "longrope", "short_factor": [1.0] * pairs, "rope_theta": 1e4}
    config["original_max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    given: dict[str, Any] = {
        "model": folder,
        "prompts": prompts,
        "reward": "rl_train.quickstart.task:reward",
        "device": "cpu",
    }
    given["out"] = tmp_path / "run"
    assert check_run(TrainOptions(**given, max_new_tokens=4)).positions == 32
    with pytest.raises(ValueError, match=r"a sequence of \d+ tokens is longer than 32, the original_max_position"):
        check_run(TrainOptions(**given, max_new_tokens=40))


def test_rows_from_python_take_the_place_of_the_files(model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": model,
        "prompts": Path("mine"),
        "reward": "rl_train.quickstart.task:reward",
        "out": tmp_path / "run",
    }
    options = TrainOptions(**given, device="cpu", eval_prompts=Path("held out"), **{"data.columns": "text=letter"})
    checked_run = check_run(options, ({"letter": letter} for letter in "abc"), [{"letter": "z"}])
    assert [prompt.row["text"] for prompt in (*checked_run.prompts, *checked_run.eval_prompts)] == ["a", "b", "c", "z"]
    with pytest.raises(ValueError, match="held out, line 1: there is no column 'letter'; the columns are 'text'"):
        check_run(options, [{"letter": "a"}], [{"text": "z"}])
    with pytest.raises(ValueError, match="mine has no lines"):
        check_run(options, [], [{"letter": "z"}])


def test_rows_from_python_have_arrays_and_tuples(model: Path, tmp_path: Path) -> None:
    def read(rows: Any, **changes: Any) -> list[Prompt]:
        given: dict[str, Any] = {"model": model, "prompts": Path("mine"), "out": tmp_path / "run", "device": "cpu"}
        return check_run(TrainOptions(**given, reward="rl_train.quickstart.task:reward", **changes), rows).prompts

    ids = [5, 6, 7]
    array = numpy.array(ids)
    for tokens in (tuple(ids), array, array.astype("uint8"), list(array), array.astype(object), torch.tensor(ids)):
        (prompt,) = read([MappingProxyType({"tokens": tokens, "answer": numpy.float32(0.5), "more": ({"a": array},)})])
        assert prompt.tokens == ids
        assert prompt.row == {"tokens": ids, "answer": 0.5, "more": [{"a": ids}]}
        json.dumps(prompt.row)
        assert set(map(type, prompt.tokens)) == {int}
    rows = numpy.array([{"text": numpy.str_("a")}, {"text": "b"}], dtype=object)
    assert [prompt.row["text"] for prompt in read(rows)] == ["a", "b"]
    for rows, message in (
        ({"text": "a"}, "rows must be an iterable of mappings, such as a list of dicts, got dict"),
        ("a", "such as a list of dicts, got str"),
        (7, "such as a list of dicts, got int"),
        (SimpleNamespace(columns=["text"]), "got SimpleNamespace; give a table as frame.to_dict"),
        ([("text", "a")], "mine, line 1: expected an object with .*, got tuple"),
        ([{"tokens": numpy.array([1.5])}], r'line 1: "tokens" must be a list of integers, got list \[1.5\]'),
        ([{"tokens": array[None]}], r"must be a list of integers, got list \[\[5, 6, 7\]\]"),
        ([{"tokens": {5, 6}}], r"must be a list of integers, got set \{5, 6\}"),
        ([{"tokens": numpy.array([True])}], r"must be a list of integers, got list \[True\]"),
    ):
        with pytest.raises(ValueError, match=message):
            read(rows)


@pytest.mark.parametrize("name", ["prompts", "eval_prompts"])
def test_every_row_is_read_as_the_reward_will_read_it(model: Path, tmp_path: Path, name: str) -> None:
    rows: dict[str, Any] = {other: [{"text": "a", "answer": "$5"}] * 3 for other in ("prompts", "eval_prompts")}
    rows[name] = [*rows[name], {"text": "a", "answer": None}]
    for file, content in rows.items():
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    options = TrainOptions(
        model=model,
        reward="number-match",
        out=tmp_path / "run",
        device="cpu",
        max_new_tokens=8,
        **{file: tmp_path / f"{file}.jsonl" for file in rows},
    )
    with pytest.raises(ValueError, match=rf"{name}.jsonl, line 4: the reward number-match: the answer None must be a"):
        check_run(options)


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    ("option", "value", "module", "message"),
    [
        ("ray", True, "ray", r"needs Ray, which is not installed: pip install 'ray>=2.50'"),
        (
            "logger",
            "tensorboard",
            "tensorboard",
            r"logger=tensorboard needs tensorboard, .*; pip install tensorboard",
        ),
    ],
)
def test_an_extra_that_is_not_installed_is_missed_before_it_starts(
    model: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    option: str,
    value: Any,
    module: str,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        check_run(TrainOptions(model=model, prompts=prompts, reward="rewards:alphabet", out=out, **{option: value}))
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "place"), [("model", "actor"), ("critic.model", "critic"), ("reference", "training/actor/step-00000002")]
)
def test_what_a_run_reads_is_not_written_over(
    model: Path, prompts: Path, tmp_path: Path, name: str, place: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(model, out / place)
    (tmp_path / "link").symlink_to(out)
    given: dict[str, Any] = {"model": model, "prompts": prompts, "reward": "rewards:alphabet", "out": out}
    given |= {"algorithm": "ppo", "kl_coefficient": 0.1, name: tmp_path / "link" / place}
    replaced = out / Path(place).parts[0]
    with pytest.raises(ValueError, match=f"{name}=.*{place} is in {replaced}, which the results of this run replace"):
        check_folder(TrainOptions(**given))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("options.json", b"5", "options.json does not come from rl-train; remove it, or choose another out"),
        ("options.json", b'{"steps": 3}', "options.json does not come from rl-train"),
        ("metrics.jsonl", b'{"step": 1}\nmine\n', "metrics.jsonl, line 2: not a line of a step; remove it"),
        ("metrics.jsonl", b"{}\n", "metrics.jsonl, line 1: not a line of a step"),
        ("metrics.jsonl", b'{"step": "1"}\n', "metrics.jsonl, line 1: not a line of a step"),
        ("metrics.jsonl", b'{"step": 1}\n\xff\n', "metrics.jsonl, line 2: not a line of a step"),
    ],
)
def test_files_that_are_not_of_a_run_are_named_and_kept(
    model: Path, prompts: Path, tmp_path: Path, name: str, text: bytes, message: str
) -> None:
    options = TrainOptions(model=model, prompts=prompts, reward="rewards:alphabet", out=tmp_path / "run")
    write_options(options)
    (options.out / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    check_folder(options)
    (options.out / name).write_bytes(text)
    with pytest.raises(ValueError, match=message):
        check_folder(options)
    assert (options.out / name).read_bytes() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "generation_config.json must hold an object, got list; correct the file, or give stop_ids"),
        ('{"eos_token_id": "2"}', r"generation_config.json: eos_token_id must be ids of tokens, got \['2'\]"),
        ('{"eos_token_id": [2, true]}', r"generation_config.json: eos_token_id must be ids of tokens, got \[2, True\]"),
    ],
)
def test_an_end_of_text_that_is_none_is_named(model: Path, tmp_path: Path, text: str, message: str) -> None:
    shutil.copy(model / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        end_of_text(tmp_path, 9)


def test_the_end_of_text_of_a_model_that_sees_is_in_its_text_config(tmp_path: Path) -> None:
    config = {"vocab_size": 9, "text_config": {"vocab_size": 9, "eos_token_id": [7, 5]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert end_of_text(tmp_path, 9) == (5, 7)
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert end_of_text(tmp_path, 9) == (2,)


def test_only_a_dry_run_imports_the_reward(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judge_of_a_test.py").write_text("raise MemoryError('there is no room for two')")
    check_run(TrainOptions(model=model, prompts=prompts, reward="judge_of_a_test:f", device="cpu"))
    command = ["train", f"--model={model}", f"--prompts={prompts}", "--reward=judge_of_a_test:f", "--device=cpu"]
    result = CliRunner().invoke(app, [*command, "--dry-run"])
    assert result.exit_code == 2, result.output
    assert "reward f: importing judge_of_a_test raised MemoryError: there is no room for two" in result.stderr
