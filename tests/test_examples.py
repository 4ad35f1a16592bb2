"""The programs in `examples/`, in the READMEs of rl-models and rl-train, and in docs/rl-models.md run as printed."""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import typer
from tests.pages import DOCS, programs
from typer.testing import CliRunner

from parallel_layers.testing import RankPool
from rl_train.cli import app
from rl_train.quickstart import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def torchrun(program: Path, *arguments: str, ranks: int = 4) -> str:
    """Return what the ranks of a program print; it runs in its own folder."""
    number = ["--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *number, str(program), *arguments]
    result = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    return result.stdout


def over_ray(program: Path, *arguments: str, timeout: float = 280) -> str:
    """Return what a program prints that starts a Ray of its own."""
    # Without these the program joins a cluster that other tests have left running, the workers start by `uv run`, as
    # this process may have, and Ray writes a token to the home folder.
    settings = {"ADDRESS": "local", "ENABLE_UV_RUN_RUNTIME_ENV": "0", "AUTH_MODE": "disabled"}
    env = os.environ | {f"RAY_{name}": value for name, value in settings.items()} | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(program), *arguments]
    result = subprocess.run(command, cwd=program.parent, env=env, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_rewards_rise(output: str) -> None:
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", output)]
    assert len(rewards) == 20
    assert rewards[-1] > 3 * rewards[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critic_on_another_grid", "grpo_from_the_pieces"])
def test_the_reward_rises(name: str) -> None:
    assert_rewards_rise(torchrun(ROOT / "examples" / f"{name}.py"))


def test_no_program_starts_a_cluster_that_other_machines_reach() -> None:
    """The first `Placement` starts a cluster on the loopback device; `ray.init()` may start one on every device."""
    programs = {path.name: path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    assert "Placement(" in programs["ray_ppo.py"]
    assert not [name for name, text in programs.items() if "ray.init(" in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "method", "number", "done", "back_to"),
    [
        # The first of the two updates of step 12; both models were saved before step 10.
        pytest.param("actor", "update", 25, 12, 10, id="in an update"),
        # The actor was saved before step 10, the critic was not: what both have is from before step 0.
        pytest.param("critic", "save_training", 2, 10, 0, id="between the two saves"),
    ],
)
def test_the_run_over_ray_goes_on_after_the_loss_of_a_rank(
    group: str, method: str, number: int, done: int, back_to: int
) -> None:
    """`done`: steps before the loss; `back_to`: the step that the run then goes on with."""
    program = ROOT / "examples" / "ray_ppo.py"
    output = over_ray(ROOT / "tests" / "kill_a_rank.py", str(program), group, method, str(number), timeout=560)
    before, after = re.split(rf"^rank 1 \(node .*\) died during {group}\.{method}: ", output, flags=re.M)
    assert "\nback to the last training checkpoint\n" in after
    first, second = ([line for line in part.splitlines() if line.startswith("step ")] for part in (before, after))
    assert [line.split(":")[0] for line in first] == [f"step {step}" for step in range(done)]
    assert [line.split(":")[0] for line in second] == [f"step {step}" for step in range(back_to, 20)]
    assert second[: done - back_to] == first[back_to:], "what was learned again is what was lost"
    assert_rewards_rise("\n".join(first[:back_to] + second))


@pytest.mark.slow
def test_the_program_in_the_readme_of_rl_models_reaches_the_reward_that_it_names(tmp_path: Path) -> None:
    page = "../packages/rl-models/README.md"
    (tmp_path / "ppo.py").write_text(programs(page))
    named = re.search(r"reward rises\s+from ([\d.]+) to more than ([\d.]+)", (DOCS / page).read_text())
    assert named is not None
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", torchrun(tmp_path / "ppo.py"))]
    assert rewards[0] == pytest.approx(float(named[1]), abs=0.01)
    assert rewards[-1] > float(named[2])
    assert (tmp_path / "learned" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_program_on_one_backbone_runs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    (tmp_path / "program.py").write_text(programs("rl-models.md"))
    torchrun(tmp_path / "program.py")
    assert (tmp_path / "learned" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_program_over_ray_in_its_guide(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    (tmp_path / "program.py").write_text(programs("ray.md"))
    assert "value_error" in over_ray(tmp_path / "program.py")
    assert (tmp_path / "run" / "actor" / "latest").exists()


@pytest.mark.vllm
def test_vllm_draws_the_responses_of_grpo() -> None:
    output = torchrun(ROOT / "examples" / "grpo_with_vllm.py", ranks=2)
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", output)]
    differences = [float(difference) for difference in re.findall(r"differ by (\S+)", output)]
    assert len(rewards) == len(differences) == 12
    assert max(differences) < 1e-5
    assert rewards[-1] > 2 * rewards[0]


@pytest.mark.slow
def test_a_policy_and_a_reward_model_learn_preferences() -> None:
    accuracies = re.findall(r"held-out accuracy of the (.+): (\d\.\d+)", torchrun(ROOT / "examples" / "preferences.py"))
    assert [name for name, _ in accuracies] == ["policy", "reward model"]
    assert all(float(accuracy) > 0.9 for _, accuracy in accuracies), accuracies


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--client"]], ids=["environment", "agent"])
def test_a_model_learns_to_call_a_calculator(tmp_path: Path, more: list[str]) -> None:
    if more:
        pytest.importorskip("openai")
    program = ROOT / "examples" / "calculator" / "train.py"
    command = [sys.executable, str(program), str(tmp_path), *more]
    result = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr
    before, after = (
        float(re.findall(rf"{name} (\d\.\d+)", result.stdout)[0]) for name in ("step 1: reward", "held out")
    )
    assert before < 0.35
    assert after > 2 * before


@pytest.mark.slow
def test_parallel_layers_alone_learn() -> None:
    output = torchrun(ROOT / "examples" / "parallel_layers_alone.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 30
    assert losses[-1] < 0.1 * losses[0]


def run_example(group: dist.ProcessGroup, name: str, steps: int) -> str:
    """Return what an example prints, on ranks that have their default process group already."""
    printed = io.StringIO()
    folder = str(ROOT / "examples")
    with mock.patch.object(sys, "path", [folder, *sys.path]), contextlib.redirect_stdout(printed):
        runpy.run_path(f"{folder}/{name}.py")["main"](steps)
    return printed.getvalue()


@pytest.mark.slow
def test_fully_shard_divides_the_layers_and_changes_no_loss(ranks: RankPool) -> None:
    alone, divided = (ranks.run(run_example, name, 3) for name in ("parallel_layers_alone", "fully_shard"))
    assert alone[0].count("loss") == 3
    assert divided == alone


@pytest.mark.slow
def test_a_policy_comes_near_its_teacher() -> None:
    output = torchrun(ROOT / "examples" / "distillation.py", ranks=2)
    divergences = [float(number) for number in re.findall(r"reverse KL (\d+\.\d+)", output)]
    assert len(divergences) == 12
    assert divergences[-1] < 0.5 * divergences[0]


@pytest.mark.slow
def test_adapters_learn_and_peft_reads_them(tmp_path: Path) -> None:
    check_adapters(torchrun(ROOT / "examples" / "lora.py", "--out", str(tmp_path), ranks=2))
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.vllm
def test_vllm_draws_with_the_adapters_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check_adapters(torchrun(ROOT / "examples" / "lora.py", "--out", str(tmp_path), "--vllm", ranks=2))


def check_adapters(output: str) -> None:
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", output)]
    assert len(rewards) == 12
    assert rewards[-1] > 0.8
    (difference,) = re.findall(r"largest difference from PEFT: (\S+)", output)
    assert float(difference) < 1e-5


@pytest.mark.slow
def test_masks_make_the_ratios_of_truncated_samples_one() -> None:
    command = [sys.executable, str(ROOT / "examples" / "truncated_samples.py")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
    rows = re.findall(r"reward (\S+), kept .* largest ratio (\S+) without the mask, (\S+) with it", output)
    rewards, without, masked = ([float(number) for number in column] for column in zip(*rows, strict=True))
    assert rewards[-1] > 5 * rewards[0]
    assert min(without) > 1.1
    assert max(masked) < 1.00002


@pytest.mark.slow
def test_invariant_draws_have_ratios_of_exactly_one() -> None:
    command = [sys.executable, str(ROOT / "examples" / "exact_ratios.py")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
    shares = re.findall(r"exactly 1: (\d+)% by the ordinary model, (\d+)% by the invariant one", output)
    assert len(shares) == 2
    assert all(int(ordinary) < 90 and int(ours) == 100 for ordinary, ours in shares)


@pytest.mark.slow
def test_replay_leaves_only_the_rounding_between_sampler_and_trainer() -> None:
    output = torchrun(ROOT / "examples" / "router_replay.py", ranks=2)
    rows = re.findall(r"reward (\S+), other experts (\S+)%, .* (\S+), with replay (\S+)", output)
    rewards, moved, without, replayed = ([float(one) for one in column] for column in zip(*rows, strict=True))
    assert rewards[-1] > 0.8
    assert 0 < sum(moved) / len(moved) < 10
    assert sum(replayed) < 0.5 * sum(without)


@pytest.mark.slow
def test_options_for_long_sequences_change_memory_and_nothing_else() -> None:
    output = torchrun(ROOT / "examples" / "long_context.py")
    rows = re.findall(r"^[dtc]p=\S+ .* (\d+\.\d) +(\d\.\d+) +(\d\.\d+)$", output, re.M)
    assert len(rows) == 9
    planned, losses, norms = ([float(one) for one in column] for column in zip(*rows, strict=True))
    assert min(planned) < 0.05 * planned[0]
    for found in losses, norms:
        assert found == pytest.approx([found[0]] * 9, rel=1e-4)


@pytest.mark.slow
def test_a_policy_that_sees_learns_the_colours(tmp_path: Path) -> None:
    output = torchrun(ROOT / "examples" / "colours" / "train.py", str(tmp_path), ranks=2)
    assert dict(re.findall(r"(\w+)\.png: (\w+)", output)) == {name: name for name in ("red", "green", "blue")}
    assert (tmp_path / "learned" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 may run here")
def test_without_a_gpu_the_program_of_fp8_says_so_and_stops() -> None:
    command = [sys.executable, str(ROOT / "examples" / "float8.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "FP8 needs an NVIDIA GPU, and torch finds none here; nothing was run"


@pytest.mark.slow
@pytest.mark.gpu
def test_fp8_learns_as_bf16_does() -> None:
    output = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "float8.py")], capture_output=True, text=True, timeout=280, check=True
    ).stdout
    rows = re.findall(r"^(bf16|current|block) +\d+ +(\S+) +(\S+) +(\S+)$", output, re.M)
    assert [row[0] for row in rows] == ["bf16", "current", "block"]
    for _, first, last, difference in rows:
        assert float(last) < float(first)
        assert float(difference) < 0.4


def test_the_run_of_smollm2_takes_the_process_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process in between, Ctrl-C would end the run before it has saved or said anything."""
    folder = ROOT / "examples" / "smollm2"
    (tmp_path / "model").mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--small", f"--model={tmp_path}/model", f"--out={tmp_path}", "--seed=1"]
    )
    given: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, command: given.extend([program, *command]))
    runpy.run_path(str(folder / "run.py"), run_name="__main__")
    assert given[:4] == [sys.executable, sys.executable, "-m", "rl_train"]
    assert given[-1] == "--seed=1"
    assert (tmp_path / "task" / "prompts.jsonl").is_file()


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program of the three stages, as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "smollm2")
    return importlib.import_module("stages")


def test_pairs_and_scores_of_the_three_stages(stages: Any, tmp_path: Path) -> None:
    stages.make_rows(tmp_path, terms=(2, 2), prompts=3, held_out=1, largest=9)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    answers = {1: ["0", "1", "1", "0"], 2: ["1", "1"], 3: ["0", "1"]}
    responses = [
        {"line": line, "response": rows[line - 1]["answer"] if right == "1" else f"{number}", "reward": float(right)}
        for line, group in answers.items()
        for number, right in enumerate(group)
    ]
    stages.write_pairs(tmp_path / "prompts.jsonl", responses, tmp_path / "pairs.jsonl")
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    expected = [(rows[0], "0"), (rows[0], "3"), (rows[2], "0")]
    assert pairs == [
        {"prompt": row["messages"], "chosen": row["answer"], "rejected": rejected} for row, rejected in expected
    ]
    assert stages.scores("sft", responses) == {"after": "sft", "seconds": 0, "form": 5 / 8, "right": 5 / 8, "best": 1}


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_three_stages_have_options_of_their_commands(stages: Any, size: str) -> None:
    options = stages.read_options(size)
    group: Any = typer.main.get_command(app)
    for command in (*stages.STAGES, "evaluate"):
        flags = {flag for parameter in group.commands[command].params for flag in parameter.opts}
        assert {f"--{name}" for name in options["model"] | options[command]} <= flags


@pytest.mark.slow
def test_the_three_stages_run_and_go_on(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, which answers nothing right: its pairs are written here."""
    make_checkpoint(tmp_path / "model", seed=0)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    pair = {"prompt": "a", "chosen": "bcd", "rejected": "x"}
    monkeypatch.setattr(stages, "write_pairs", lambda *files: files[2].write_text(json.dumps(pair) + "\n"))
    options = stages.read_options("small")
    options["task"] |= {"prompts": 8, "held_out": 2}
    options["model"] |= {"device": "cpu"}
    for stage in stages.STAGES:
        options[stage]["steps"] = 1
    options["train"] |= {"prompts-per-step": 2, "samples": 2}

    def run(command: list[str], **_: Any) -> None:
        result = CliRunner().invoke(app, command[3:])
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(stages, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    rows = stages.run_stages(options, tmp_path / "model", tmp_path / "out", 0)
    assert [row["after"] for row in rows] == ["before", *stages.STAGES]
    assert all(row["seconds"] > 0 for row in rows[1:])
    assert len((tmp_path / "out" / "drawn.jsonl").read_text().splitlines()) == 8 * 4
    sources = [json.loads((tmp_path / "out" / stage / "options.json").read_text())["model"] for stage in stages.STAGES]
    assert [Path(source).parent.name for source in sources[1:]] == ["sft", "dpo"]
    monkeypatch.setattr(stages, "subprocess", None)  # nothing is left to do
    assert stages.run_stages(options, tmp_path / "model", tmp_path / "out", 0) == rows
