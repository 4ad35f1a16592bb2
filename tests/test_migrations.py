"""The programs of docs/migrate.md: TRL's run and ours learn the same task, and verl's options have counterparts."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rl_train.cli import app
from rl_train.quickstart import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "migrate"
SCRIPT = EXAMPLE / "verl_grpo.sh"
CP = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a small model and rows of verl."""
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for module in ("questions", "verl_reward"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.fixture
def translated() -> Any:
    return runpy.run_path(str(EXAMPLE / "from_verl.py"))["translated"]


def train(program: str, out: Path) -> None:
    command = [sys.executable, str(EXAMPLE / program), "checkpoint", str(out)]
    subprocess.run(
        command, check=True, timeout=280, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    )


def test_the_options_of_the_run_from_trl_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.setattr("rl_train.loop.run.train", lambda run, on_event: runs.append(run.options))
    monkeypatch.setattr(sys, "argv", ["from_trl.py", "checkpoint", "out"])
    runpy.run_path(str(EXAMPLE / "from_trl.py"), run_name="__main__")
    (options,) = runs
    theirs = dict(re.findall(r"^    (\w+)=([\w.\"-]+),", (EXAMPLE / "trl_grpo.py").read_text(), re.MULTILINE))
    assert options.steps == int(theirs["max_steps"])
    assert options.samples == int(theirs["num_generations"])
    assert options.prompts_per_step * options.samples == int(theirs["per_device_train_batch_size"])
    assert options.sampling.max_new_tokens == int(theirs["max_completion_length"])
    assert options.optimizer.learning_rate == float(theirs["learning_rate"])
    assert options.objective.clip_low == float(theirs["epsilon"])


@pytest.mark.slow
def test_both_runs_learn_the_task(folder: Path) -> None:
    """TRL's too where it is installed: 20 steps raise the reward of the same rows by the same function."""
    train("from_trl.py", folder / "ours")
    ours = [json.loads(line)["reward"] for line in (folder / "ours" / "metrics.jsonl").open()]
    assert len(ours) == 20
    assert sum(ours[-5:]) > 1.5 * sum(ours[:5])
    pytest.importorskip("trl")
    train("trl_grpo.py", folder / "theirs")
    log = json.loads((folder / "theirs" / "trainer_state.json").read_text())["log_history"]
    theirs = [entry["reward"] for entry in log if "reward" in entry]
    assert len(theirs) == 20
    assert sum(theirs[-5:]) > 1.5 * sum(theirs[:5])


def test_the_page_shows_the_command_for_verls_script(translated: Any) -> None:
    command = shlex.join([*translated(SCRIPT.read_text()), "--reward", "MODULE:FUNCTION"])
    (shown,) = re.findall(
        r"^```bash\n(rl-train train .*?)^```", (ROOT / "docs" / "migrate.md").read_text(), re.S | re.M
    )
    assert shlex.split(shown.replace("\\\n", " ")) == shlex.split(command)


def test_verls_defaults_and_lists_have_counterparts(translated: Any) -> None:
    words = f'{CP}=2 trainer.n_gpus_per_node=8 trainer.logger=\'["console", "wandb"]\' trainer.save_freq=-1'
    command = shlex.join(translated(f"python3 -m verl.trainer.main_ppo {words} +algorithm.adv_estimator=rloo"))
    for option in ("--dims dp=4,cp=2", "--logger wandb", "--save-every 0", "--algorithm rloo", "--mini-batch 256"):
        assert option in command
    assert "--algorithm ppo" in shlex.join(translated(""))


def test_rl_train_takes_the_command_for_verls_script(folder: Path, translated: Any) -> None:
    """With rows of verl, up to the start of the ranks."""
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}}
    text = "".join(json.dumps({**row, "prompt": letter}) + "\n" for letter in "abcd")
    script = SCRIPT.read_text()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(text)
        script = script.replace(f"{name}.parquet", f"{name}.jsonl")
    script = script.replace("rollout.name=vllm", "rollout.name=hf").replace("gpus_per_node=2", "gpus_per_node=1")
    words = translated(re.sub(r".*gpu_memory_utilization.*\n", "", script))
    result = CliRunner().invoke(app, [*words[1:], "--reward", "verl_reward:reward", "--device=cpu", "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("algorithm.use_kl_in_reward=True", "algorithm.use_kl_in_reward=True has no counterpart"),
        ("actor_rollout_ref.rollout.name=sglang", "rollout.name=sglang has no counterpart"),
        ("trainer.total_epochs=15", "trainer.total_epochs=15 has no counterpart"),
    ],
)
def test_an_option_without_a_counterpart_is_an_error(translated: Any, word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translated(f"{SCRIPT.read_text().rstrip()} \\\n    {word}\n")
