"""`rl-train train`: it learns, every algorithm runs, a kill changes nothing, and mistakes have a name and a line."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from ckpt.files import read_header
from ckpt.training import saved_steps
from rl_train.cli.commands import app
from rl_train.quickstart.task import MODEL, make_checkpoint

from ..engines.server import Server

METRICS = (
    *("reward", "response_length", "truncated", "kl", "approx_kl", "clip_fraction", "entropy", "grad_norm"),
    *("learning_rate", "critic_loss", "critic_value_error", "tokens_per_second", "seconds", "seconds_scoring"),
)
SMALL = {"prompts-per-step": 8, "max-new-tokens": 6, "device": "cpu", "save-every": 0, "learning-rate": 3e-3}


def arguments(model: Path, prompts: Path, out: Path, **options: Any) -> list[str]:
    given = {"model": model, "prompts": prompts, "reward": "rewards:alphabet", "out": out, **SMALL}
    given |= {name.replace("_", "-"): value for name, value in options.items()}
    return ["train", *(f"--{name}={value}" for name, value in given.items())]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if "second" not in name}


@pytest.mark.usefixtures("folder_of_rewards")
def test_ppo_learns_and_reports(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"algorithm": "ppo", "steps": 10, "prompts_per_step": 32, "epochs": 4, "mini_batch": 32}
    options |= {"critic.learning_rate": 3e-3, "kl_coefficient": 0.001, "eval_every": 5, "eval_prompts": prompts}
    options |= {"evaluation.samples": 3, "evaluation.temperature": 1, "evaluation.top_p": 0.9}
    has_board = importlib.util.find_spec("tensorboard") is not None  # an extra
    flags = ["--json", *["--logger=tensorboard"] * has_board]
    result = CliRunner().invoke(app, [*arguments(model, prompts, out, **options), *flags])
    assert result.exit_code == 0, result.output
    before, *records = lines(out)
    assert [record["step"] for record in records] == list(range(1, 11))
    assert records[-1]["reward"] > 3 * records[0]["reward"]
    evaluated = [before, *(record for record in records if "eval/reward" in record)]
    assert [record["step"] for record in evaluated] == [0, 5, 10]
    assert before.keys() >= {"eval/reward", "eval/truncated", "seconds_evaluating"}
    for record in evaluated:
        assert record["eval/reward"] <= record["eval/pass@2"] <= record["eval/pass@3"]
    assert records[-1]["eval/pass@2"] > 2 * before["eval/pass@2"]
    for name in METRICS:
        assert all(math.isfinite(record[name]) for record in records), name
    phases = [record[f"seconds_{name}"] for record in records for name in ("generating", "estimating", "learning")]
    assert 0.5 * sum(record["seconds"] for record in records) < sum(phases) <= sum(r["seconds"] for r in records)
    assert "seconds_evaluating" in records[-1]
    assert all(record["rollout_difference"] < 1e-5 for record in records)
    if has_board:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(out / "tensorboard"))
        board.Reload()
        assert [event.step for event in board.Scalars("reward")] == list(range(1, 11))
    assert '"name": "run"' in (out / "report.html").read_text()
    assert json.loads(result.stdout)["reward"] == records[-1]["reward"]
    reward, held_out, length = (records[-1][name] for name in ("reward", "eval/reward", "response_length"))
    last = f"step 10/10  reward {reward:.3f}  held-out {held_out:.3f}  response length {length:.1f}"
    assert any(line.startswith(f"{last}  ") for line in result.stderr.splitlines())
    said = f"done: after 10 steps the model is in {out / 'actor'}, the curves in {out / 'report.html'}"
    assert result.stderr.splitlines()[-1] == said
    assert AutoModelForCausalLM.from_pretrained(out / "actor").config.vocab_size == 30
    assert (out / "critic" / "model.safetensors").is_file()


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize("dims", ["", pytest.param("dp=2", marks=pytest.mark.slow)])
def test_several_rewards_and_their_failures_are_in_the_metrics(
    model: Path, prompts: Path, tmp_path: Path, dims: str
) -> None:
    options = {"steps": 2, "algorithm": "reinforce++", "dims": dims, "rewards.errors": "zero"}
    given = arguments(model, prompts, tmp_path / "run", **options)
    result = CliRunner().invoke(app, [*given, "--reward=one=rewards:constant@0.5", "--reward=rewards:first_ids"])
    assert result.exit_code == 0, result.output
    for record in lines(tmp_path / "run"):
        assert record["reward/one"] == 1
        assert record["reward"] == pytest.approx(record["reward/alphabet"] + 0.5)
        assert (record["reward/first_ids"], record["reward_errors"]) == (0, 8)
    said = f"8 rewards failed and count as 0; {prompts}, line "
    assert said in result.stderr
    assert "the reward first_ids raised KeyError: 'bad' (rewards.py, line " in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
def test_ppo_learns_on_a_shared_backbone(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"algorithm": "ppo", "dims": "tp=2", "steps": 20, "prompts_per_step": 32, "epochs": 2, "mini_batch": 32}
    options |= {"kl_coefficient": 0.001, "eval_every": 10, "eval_prompts": prompts}
    result = CliRunner().invoke(app, [*arguments(model, prompts, out, **options), "--share-backbone"])
    assert result.exit_code == 0, result.output
    _, *records = lines(out)  # the first is of the evaluation before
    assert records[-1]["reward"] > 3 * records[0]["reward"]
    for name in METRICS:
        assert all(math.isfinite(record[name]) for record in records), name
    # A head that still said 0 would be off by the mean square of the reward.
    last = records[-1]
    assert last["critic_value_error"] < 0.75 * (last["reward"] ** 2 + last["reward_std"] ** 2)
    assert AutoModelForCausalLM.from_pretrained(out / "actor").config.vocab_size == 30
    values = AutoModelForTokenClassification.from_pretrained(out / "actor").score.weight
    assert values.any()
    assert not (out / "critic").exists()


@pytest.mark.parametrize(
    ("algorithm", "dims"),
    [
        ("grpo", "tp=2"),
        pytest.param("dapo", "", marks=pytest.mark.slow),
        pytest.param("rloo", "pp=2", marks=pytest.mark.slow),
        pytest.param("reinforce++", "tp=2", marks=pytest.mark.slow),
        pytest.param("reinforce++", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("dr-grpo", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("cispo", "tp=2", marks=pytest.mark.slow),
        pytest.param("sapo", "tp=2", marks=pytest.mark.slow),
        pytest.param("gspo", "tp=2", marks=pytest.mark.slow),
        pytest.param("ppo", "pp=2", marks=pytest.mark.slow),
        pytest.param("ppo", "dp=2,pp=2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("folder_of_rewards")
def test_every_algorithm_runs_the_same_on_a_grid_as_on_one_rank(
    model: Path, prompts: Path, tmp_path: Path, algorithm: str, dims: str
) -> None:
    curves = []
    for name, grid in (("one", ""), ("grid", dims)):
        options = {"algorithm": algorithm, "steps": 2, "dims": grid, "kl_coefficient": 0.1, "seed": 1}
        if algorithm == "grpo":
            options |= {"staleness": 1, "importance_cap": 5, "objective.importance.level": "geometric"}
        result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / name, **options))
        assert result.exit_code == 0, result.output
        curves.append([timeless(record) for record in lines(tmp_path / name)])
    for one, other in zip(*curves, strict=True):
        if "dp" in dims:
            # Data-parallel ranks draw from streams of their own.
            assert one.keys() == other.keys()
            assert all(math.isfinite(value) for value in other.values())
        else:
            assert one == pytest.approx(other, rel=1e-3, abs=2e-4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model of the same letters, which is sure of its tokens."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL, "hidden_size", 128)
        make_checkpoint(path, seed=1)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.lm_head.weight.data *= 8
    model.save_pretrained(path)
    return path


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    "grid",
    [
        {},
        pytest.param({"dims": "tp=2", "reference-dims": "dp=2"}, marks=pytest.mark.slow),
        pytest.param({"dims": "dp=2", "reference-dims": "pp=2"}, marks=pytest.mark.slow),
        pytest.param({"objective.divergence": "reverse_kl"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "dims": "tp=2",
                "reference-dims": "dp=2",
                "objective.divergence": "jensen_shannon",
                "objective.mixture": 0.9,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_policy_learns_from_a_teacher(
    model: Path, teacher: Path, prompts: Path, tmp_path: Path, grid: dict[str, Any]
) -> None:
    """The divergence from the teacher falls, while the rewards are only reported."""
    options = {
        "algorithm": "on-policy-distillation",
        "reference": teacher,
        "steps": 12,
        "prompts_per_step": 64,
        "epochs": 2,
    }
    result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", **options, **grid))
    assert result.exit_code == 0, result.output
    records = lines(tmp_path / "run")
    assert records[-1]["kl"] < 0.5 * records[0]["kl"]
    assert all(math.isfinite(record["reward"]) for record in records)


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize("dims", ["", "dp=2"])
def test_a_policy_learns_from_a_server(model: Path, teacher: Path, prompts: Path, tmp_path: Path, dims: str) -> None:
    with Server(teacher) as server:
        options = {"algorithm": "on-policy-distillation", "teacher.engine": server.url, "dims": dims, "steps": 12}
        options |= {"prompts_per_step": 64, "epochs": 2, "objective.divergence": "reverse_kl", "teacher.top_k": 8}
        result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", **options))
        server.shutdown()
    assert result.exit_code == 0, result.output
    records = lines(tmp_path / "run")
    assert records[-1]["kl"] < 0.5 * records[0]["kl"]
    assert sum("prompt_logprobs" in body for _, body in server.calls) == 1 + 12 * 64, "the first one is the check"


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
def test_a_policy_learns_from_a_native_engine(model: Path, teacher: Path, prompts: Path, tmp_path: Path) -> None:
    options = {"algorithm": "on-policy-distillation", "reference": teacher, "dims": "dp=2", "steps": 12}
    options |= {"teacher.engine": "native", "teacher.devices": "cpu", "objective.divergence": "reverse_kl"}
    options |= {"prompts_per_step": 64, "epochs": 2, "teacher.top_k": 8}
    result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", **options))
    assert result.exit_code == 0, result.output
    records = lines(tmp_path / "run")
    assert records[-1]["kl"] < 0.5 * records[0]["kl"]


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
def test_adapters_learn_from_their_base_that_reads_more(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": x, "hint": x + "zyx"}) + "\n" for x in "abcdefgh"))
    options = {"algorithm": "on-policy-distillation", "teacher.prompts": "hint", "lora_rank": 16, "steps": 12}
    options |= {"prompts_per_step": 64, "epochs": 4, "learning_rate": 1e-2, "objective.divergence": "reverse_kl"}
    result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", **options))
    assert result.exit_code == 0, result.output
    records = lines(tmp_path / "run")
    assert records[-1]["kl"] < 0.5 * records[0]["kl"]


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize("dims", ["dp=2", "tp=2"])
def test_a_loss_of_ones_own_learns_from_groups_that_differ(
    model: Path, prompts: Path, tmp_path: Path, dims: str
) -> None:
    options = {"steps": 3, "dims": dims, "loss": "own_losses:reinforce", "equal_groups": "drop", "samples": 4}
    result = CliRunner().invoke(app, [*arguments(model, prompts, tmp_path / "run", **options), "--groups-on-one-rank"])
    assert result.exit_code == 0, result.output
    for record in lines(tmp_path / "run"):
        assert record["prompts_dropped"] == pytest.approx(record["frac_reward_zero_std"] * 8)
        assert record["responses_kept"] == 4 * (8 - record["prompts_dropped"])
        assert "approx_kl" not in record, "that is a metric of the losses of the table"
        assert record["groups"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
def test_adapters_learn_and_their_base_is_the_reference(model: Path, prompts: Path, tmp_path: Path) -> None:
    options = {"algorithm": "ppo", "steps": 15, "prompts_per_step": 32, "epochs": 4, "kl_coefficient": 0.001}
    options |= {"learning_rate": 1e-2, "critic.learning_rate": 1e-2, "mini_batch": 32, "save_every": 5}
    options |= {"lora_rank": 16, "engine.lora.targets": ".*layers.*_proj|lm_head"}
    curves = []
    # With --offload the critic has a base of its own, otherwise that of the policy.
    for dims, flags in (("", []), ("tp=2", []), ("tp=2", ["--offload"])):
        out = tmp_path / "-".join([dims or "one", *flags])
        result = CliRunner().invoke(app, [*arguments(model, prompts, out, **options, dims=dims), *flags])
        assert result.exit_code == 0, result.output
        curves.append([record["reward"] for record in lines(out)])
        assert lines(out)[0]["kl"] == pytest.approx(0, abs=1e-6)
        assert lines(out)[-1]["kl"] > 0
        assert {path.name for path in out.glob("*-adapter/*")} == {"adapter_config.json", "adapter_model.safetensors"}
    assert curves[0][-1] > 2 * curves[0][0]
    assert curves[0][:2] == pytest.approx(curves[1][:2], abs=1e-3)
    assert curves[1] == curves[2]


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
def test_memory_is_saved_and_nothing_else_changes(model: Path, prompts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm": "ppo", "steps": 3, "dims": "tp=2", "kl_coefficient": 0.1}
    saving = {"recompute": "selective", "critic.dims": "pp=2", "max_tokens": 64}
    curves = []
    for name, more, flags in (("plain", {}, []), ("saving", saving, ["--offload", "--no-sequence-parallel"])):
        command = [*arguments(model, prompts, tmp_path / name, **options, **more), *flags]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        curves.append([timeless(record) for record in lines(tmp_path / name)])
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=2e-4)


@pytest.fixture
def mixture(tmp_path: Path) -> tuple[Path, Path]:
    """A small mixture of experts, and a file of prompts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 30}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, tie_word_embeddings=False)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"tokens": [1, n]}) + "\n" for n in range(8)))
    return tmp_path / "model", prompts


@pytest.mark.usefixtures("folder_of_rewards")
def test_an_invariant_run_has_no_rollout_difference(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    """bf16, experts replayed, log-probs over sampling masks: draws and training have the same bits."""
    options = {"steps": 2, "reward": "rewards:sevens", "dtype": "bfloat16", "top_p": 0.9, "max-new-tokens": 3}
    flags = ["--engine.tp-invariant", "--objective.router-replay", "--sampling.keep-sampling-mask"]
    result = CliRunner().invoke(app, [*arguments(*mixture, tmp_path / "run", **options), *flags])
    assert result.exit_code == 0, result.output
    for record in lines(tmp_path / "run"):
        assert record["rollout_difference"] == record["rollout_difference_mean"] == 0
        assert record["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
def test_a_mixture_of_experts_learns_with_its_routing_replayed(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    options = {
        "steps": 2,
        "dims": "dp=2,ep=2",
        "engine.router_losses.balance": 0.01,
        "reward": "rewards:sevens",
        "epochs": 2,
    }
    result = CliRunner().invoke(app, [*arguments(*mixture, tmp_path / "run", **options), "--objective.router-replay"])
    assert result.exit_code == 0, result.output
    assert all(record["grad_norm"] > 0 for record in lines(tmp_path / "run"))


def launch(command: list[str], folder: Path) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "rl_train", *command]
    return subprocess.Popen(program, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(command: list[str]) -> str:
    """Run a command to its end and return what it said: over Ray as a process of its own, on ranks from this one."""
    if "--ray" not in command:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stderr
    process = launch(command, Path.cwd())
    _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    return said


@pytest.fixture
def quiet_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of its own, whatever else runs here; and as in the tests of Ray groups no `uv run` for each worker, no
    token in the home folder, no reports."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name, value in (("ENABLE_UV_RUN_RUNTIME_ENV", "0"), ("AUTH_MODE", "disabled"), ("USAGE_STATS_ENABLED", "0")):
        monkeypatch.setenv(f"RAY_{name}", value)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_ray")
@pytest.mark.parametrize(
    ("algorithm", "samples", "dims", "flag"),
    [
        ("ppo", 1, "dp=2", "--no-ray"),
        ("ppo", 1, "tp=2", "--share-backbone"),
        ("grpo", 2, "tp=2", "--no-ray"),
        ("ppo", 1, "", "--ray"),
    ],
)
def test_a_killed_run_goes_on_with_the_same_curve(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    folder_of_rewards: Path,
    algorithm: str,
    samples: int,
    dims: str,
    flag: str,
) -> None:
    # Mini-batches in a shuffled order, a temperature, and prompts of several passes: all of it goes on.
    options = {
        "algorithm": algorithm,
        "samples": samples,
        "dims": dims,
        "steps": 8,
        "save_every": 2,
        "schedule": "cosine",
    }
    options |= {"mini_batch": 4, "temperature": 1.2, "seed": 3}
    whole, killed = (arguments(model, prompts, tmp_path / name, **options) for name in ("whole", "killed"))
    shared = [flag] * (flag == "--share-backbone")
    assert CliRunner().invoke(app, [*whole, *shared], catch_exceptions=False).exit_code == 0
    # The alphabet's reward, slowed down, so that there is a moment to be killed in.
    slow = [argument.replace("rewards:alphabet", "rewards:slow_alphabet") for argument in killed]
    process = launch([*slow, flag], folder_of_rewards)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 5):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(lines(tmp_path / "killed")) < 8
    assert "going on after step" in finish([*slow, flag])
    first, second = ([timeless(record) for record in lines(tmp_path / name)] for name in ("whole", "killed"))
    assert [record["step"] for record in second] == list(range(1, 9))
    # Ranks on Ray have another number of threads than the whole run had, so sums are rounded otherwise.
    tolerance = {"rel": 1e-4, "abs": 1e-6} if flag == "--ray" else {"rel": 1e-6, "abs": 1e-9}
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, **tolerance)
    # Once more: there is nothing left to do, and nothing is lost.
    assert CliRunner().invoke(app, killed[:3] + slow[3:] + shared, catch_exceptions=False).exit_code == 0
    assert [timeless(record) for record in lines(tmp_path / "killed")] == second


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards", "quiet_ray")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["--dims=tp=2"], ["--dims=pp=2"]),
        (["--dims=pp=2"], ["--dims=cp=2", "--backend=transformers"]),
        (["--dims=cp=2", "--critic.dims=tp=2"], ["--dims=tp=2", "--ray"]),
    ],
    ids=["tp2-pp2", "pp2-transformers", "cp2-ray"],
)
def test_a_run_goes_on_on_another_grid(
    model: Path, prompts: Path, tmp_path: Path, first: list[str], then: list[str]
) -> None:
    """Two steps on one and two on the other are the four steps of one rank."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    options: dict[str, Any] = {"algorithm": "ppo", "save_every": 1, "keep": 1, "kl_coefficient": 0.1}
    for folder, steps, flags in ((whole, 4, []), (out, 2, first), (out, 4, then)):
        said = finish([*arguments(model, prompts, folder, **options, steps=steps), *flags])
    assert "going on after step 2" in said
    for one, other in zip(lines(whole), lines(out), strict=True):
        assert timeless(one) == pytest.approx(timeless(other), rel=1e-3, abs=2e-4)
    # Of two models that are saved one after the other, a kill may leave the newest of one alone.
    assert [saved_steps(out / "training" / name) for name in ("actor", "critic")] == [[3, 4]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize("dims", ["dp=2", "cp=2"])
def test_the_backends_give_the_same_curve(model: Path, prompts: Path, tmp_path: Path, dims: str) -> None:
    curves = []
    for backend in ("parallel", "transformers"):
        options = {"algorithm": "ppo", "steps": 3, "dims": dims, "kl_coefficient": 0.1, "backend": backend}
        result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / backend, **options))
        assert result.exit_code == 0, result.output
        curves.append([timeless(record) for record in lines(tmp_path / backend)])
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=2e-4)


@pytest.mark.usefixtures("folder_of_rewards")
def test_a_dry_run_prints_the_plan_and_runs_nothing(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text('algorithm = "dapo"\nsteps = 6\n')
    given = [*arguments(model, prompts, out, steps=3), f"--config={tmp_path / 'run.toml'}", "--dry-run"]
    result = CliRunner().invoke(app, [*given, "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    expected = {"algorithm": "dapo", "steps": 3, "samples": 8, "objective.clip_high": 0.28, "stop_ids": [2], "ranks": 1}
    expected |= {"longest_sequence": 2 + 6, "positions": 64}
    assert expected.items() <= plan.items()
    assert plan["responses_per_step"] == 64
    assert plan["passes_over_prompts"] == 2
    assert not out.exists()
    given_ppo = [*arguments(model, prompts, out, algorithm="ppo"), "--share-backbone", "--dry-run", "--json"]
    plan = json.loads(CliRunner().invoke(app, given_ppo).stdout)
    expected = {"critic.share_backbone": True, "critic": f"a head on {model}", "critic.value_coefficient": 0.5}
    assert expected.items() <= plan.items()
    refused = CliRunner().invoke(app, [*given_ppo, "--backend=megatron"])
    assert refused.exit_code == 2
    assert "does not offer the role 'causal_lm_with_value'" in refused.stderr
    shown = CliRunner().invoke(app, given).stdout
    assert "dapo" in shown
    assert len(shown.splitlines()) <= 24, "it fits a screen"
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"reward": "rewards"}, [{"text": "a"}], "module:function, such as rewards:length"),
        ({"reward": "rewards:none"}, [{"text": "a"}], "reward none: rewards has no function none"),
        (
            {"reward": "no_such_module:f"},
            [{"text": "a"}],
            "reward f: importing no_such_module raised ModuleNotFoundError",
        ),
        ({}, [{"text": "a"}, {"txt": "b"}], "prompts.jsonl, line 2: expected an object with one of"),
        ({}, [{"text": "a"}, {"text": "a" * 64}], "line 2: 65 tokens are more than the model's 64 positions"),
        ({"max_tokens": 8}, [{"text": "abc"}], "line 1: 4 tokens are more than --max-tokens less --max-new-tokens"),
        (
            {"reward": "rewards:first_ids"},
            [{"text": "a", "bad": 1}, {"text": "b", "bad": "nan"}],
            "prompts.jsonl, line 2: the reward first_ids returned nan; it must be finite in fp32",
        ),
        pytest.param(
            {"reward": "rewards:first_ids", "dims": "dp=2"},
            [{"text": "a", "bad": 1}, {"text": "b"}],
            "prompts.jsonl, line 2: the reward first_ids raised KeyError: 'bad' (rewards.py, line ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reward": "rewards:leave"},
            [{"text": "a"}],
            "prompts.jsonl, line 1: the reward leave raised SystemExit: 3 (rewards.py, line ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reward": "rewards:huge"},
            [{"text": "a", "scale": 10}],
            "line 1: the reward huge returned",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reward": "rewards:huge", "algorithm": "rloo", "dims": "tp=2", "prompts_per_step": 16},
            [{"text": "a"}],
            "step 1: the gradient norm is nan",
            marks=pytest.mark.slow,
        ),
        ({"reward": "rewards:constant", "algorithm": "dapo"}, [{"text": "a"}], "there is nothing for dapo to learn"),
        # Before any rank is started:
        ({"dims": "tp=3"}, [{"text": "a"}], "num_attention_heads=4 is not divisible by tp=3; use tp in {1, 2, 4}"),
        ({"dims": "pp=9"}, [{"text": "a"}], "num_hidden_layers=2 is fewer than"),
        ({"dims": "ep=2,dp=2"}, [{"text": "a"}], "ep=2 is for a mixture of experts, which llama is not"),
        ({"dims": "pp=2", "backend": "transformers"}, [{"text": "a"}], "does not offer pp=2; it offers dp, cp, tp, ep"),
        ({"backend": "mine"}, [{"text": "a"}], "backend='mine' is not available; available: parallel"),
        ({"recompute": "0,2"}, [{"text": "a"}], "recompute: there are no layers [2]; the model has 0..1"),
        ({"stop_ids": "2,99"}, [{"text": "a"}], "stop_ids [99] are outside the vocabulary of 30"),
        ({"algorithm": "pop"}, [{"text": "a"}], "the command line: algorithm='pop' must be 'ppo', 'grpo'"),
    ],
)
def test_mistakes_are_one_line_and_named(
    model: Path, tmp_path: Path, options: dict[str, Any], rows: list[dict[str, Any]], message: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"steps": 1, "prompts_per_step": 2, **options}
    result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", **given))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_rewards", "quiet_ray")
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        pytest.param([], {"actor": 1, "critic": 1}, id="two models"),
        pytest.param(["--share-backbone", "--dims=dp=2"], {"actor": 2}, id="one backbone on dp 2"),
        pytest.param(["--share-backbone", "--dims=dp=2,replicate=2"], {"actor": 1}, id="one backbone in two replicas"),
        pytest.param(["--dims=tp=2", "--critic.dims=dp=2"], {"actor": 1, "critic": 2}, id="a critic on another grid"),
        pytest.param(["--kl-coefficient=0.1", "--offload"], {"actor": 1, "critic": 1}, id="three models in turns"),
    ],
)
def test_ray_gives_the_same_curve(
    model: Path, prompts: Path, tmp_path: Path, flags: list[str], parts: dict[str, int]
) -> None:
    """`parts`: in how many each model's norms are saved, which dp divides in a replica and tp does not."""
    curves = []
    for name, flag in (("ranks", "--no-ray"), ("ray", "--ray")):
        options = {"algorithm": "ppo", "steps": 3, "save_every": 2}
        finish([*arguments(model, prompts, tmp_path / name, **options), flag, *flags])
        curves.append([timeless(record) for record in lines(tmp_path / name)])
        assert (tmp_path / name / "critic" / "model.safetensors").is_file() == ("critic" in parts)
        keys = [
            (file.parts[-3], key)
            for file in (tmp_path / name / "training").glob("*/step-00000003/*.safetensors")
            for key in read_header(file).tensors
        ]
        assert Counter(which for which, key in keys if key.startswith("model/model.norm.weight@")) == parts
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
