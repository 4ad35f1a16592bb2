"""The README's programs run as they are written, and its table lists every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import parallel_layers
from parallel_layers import attention, inference, invariant, moe, rotary, testing
from parallel_layers.attention import context_parallel
from parallel_layers.distributed import collectives, equal_parts
from parallel_layers.head.embedding import check_token_ids, vocab_range
from parallel_layers.memory import random_states
from parallel_layers.norm.backends import available_norm_backends
from parallel_layers.sharding import load_full_

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_mlp_has_as_many_lines_as_it_says() -> None:
    assert "in 20 lines" in README[: README.index(PROGRAMS[0])]
    assert len([line for line in PROGRAMS[0].splitlines() if line.strip()]) <= 20


def test_the_mlp_learns_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mlp.py"
    script.write_text(PROGRAMS[0])
    out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


def test_run_ranks_prints_what_it_says(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(PROGRAMS[1])
    assert run(str(script)).strip() == "[5.0, 5.0]"


def test_the_table_lists_every_public_name() -> None:
    listed = {
        name for row in README.splitlines() if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    functions = {
        name
        for module in (collectives, equal_parts)
        for name, value in vars(module).items()
        if callable(value) and value.__module__ == module.__name__
    }
    public = {
        *parallel_layers.__all__,
        *(name for name in functions if not name.startswith("_")),
        *attention.__all__,
        *context_parallel.__all__,
        *inference.__all__,
        *invariant.__all__,
        *moe.__all__,
        *random_states.__all__,
        *rotary.__all__,
        *(one.__name__ for one in (available_norm_backends, check_token_ids, load_full_, vocab_range)),
        *(name for name in testing.__all__ if not name.startswith(("RankDied", "RankTimeout"))),
    }
    assert public - listed == set()
    assert listed - public == set()
