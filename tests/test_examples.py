"""The programs in `examples/`, and the one in rl-models' README, run under torchrun as printed."""

import re
import subprocess
import sys
from pathlib import Path

from rl_models.quickstart.task import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def torchrun(program: Path) -> str:
    """What four ranks of a program print; it runs in its own folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(program)]
    result = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_critic_on_another_grid_learns() -> None:
    output = torchrun(ROOT / "examples" / "critic_on_another_grid.py")
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", output)]
    assert len(rewards) == 20
    assert rewards[-1] > 3 * rewards[0]


def test_the_program_in_the_readme_of_rl_models(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "packages/rl-models/README.md").read_text(), re.S | re.M)
    (tmp_path / "program.py").write_text(program)
    torchrun(tmp_path / "program.py")
    assert (tmp_path / "learned" / "model.safetensors").is_file()
