"""The programs in `examples/`, in the READMEs of rl-models and rl-train, and in docs/rl-models.md run as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_train.quickstart.task import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def torchrun(program: Path, ranks: int = 4) -> str:
    """Return what the ranks of a program print; it runs in its own folder."""
    number = ["--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *number, str(program)]
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


def printed_program(page: str) -> str:
    """The only program on a page."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critic_on_another_grid", "grpo_from_the_pieces"])
def test_the_reward_rises(name: str) -> None:
    assert_rewards_rise(torchrun(ROOT / "examples" / f"{name}.py"))


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
def test_the_reward_of_the_program_in_the_readme_of_rl_models_rises(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "quickstart" / "start", seed=0)
    (tmp_path / "program.py").write_text(printed_program("packages/rl-models/README.md"))
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", torchrun(tmp_path / "program.py"))]
    assert rewards[-1] > 3 * rewards[0]
    assert (tmp_path / "learned" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_program_on_one_backbone_runs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    (tmp_path / "program.py").write_text(printed_program("docs/rl-models.md"))
    torchrun(tmp_path / "program.py")
    assert (tmp_path / "learned" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_program_over_ray_in_its_guide(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    (tmp_path / "program.py").write_text(printed_program("docs/ray.md"))
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
def test_a_model_learns_to_call_a_calculator(tmp_path: Path) -> None:
    program = ROOT / "examples" / "calculator" / "train.py"
    command = [sys.executable, str(program), str(tmp_path)]
    result = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=280)
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
