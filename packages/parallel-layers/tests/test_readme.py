"""The programs in the README and in the guide run as printed, and both tables of names list every public name."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import parallel_layers
from parallel_layers.testing import RankPool

ROOT = Path(__file__).parents[3]
README = (ROOT / "packages/parallel-layers/README.md").read_text()
GUIDE = (ROOT / "docs/parallel-layers.md").read_text()


def program(page: str) -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return str(found)


def run_program(group: ProcessGroup, text: str) -> str:
    """Return what the program prints, on ranks that have their default process group already."""
    printed = io.StringIO()
    kept = {"init_process_group": lambda backend: None, "destroy_process_group": lambda: None}
    with contextlib.redirect_stdout(printed), mock.patch.multiple(dist, **kept):
        exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    torch.set_default_device(None)
    return printed.getvalue()


def test_the_decoder_learns(ranks: RankPool) -> None:
    """Five of the program's 20 steps, on a third of each text; the loss of random bytes is ln 256 = 5.5."""
    text = program(README)
    assert "range(20)" in text
    assert "[:300]" in text
    printed = ranks.run(run_program, text.replace("range(20)", "range(5)").replace("[:300]", "[:100]"))
    assert float(*re.findall(r"loss ([\d.]+)", printed[0])) < 4
    assert not any(printed[1:])


@pytest.mark.slow
def test_the_decoder_learns_on_two_ranks(tmp_path: Path) -> None:
    """The command and the program as they are printed."""
    script = tmp_path / "decoder.py"
    script.write_text(program(README))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]


def test_run_ranks_prints_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(program(GUIDE))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip() == "[5.0, 5.0]"


def names(table: str, column: int) -> set[str]:
    """The names in a column, without their modules, which stand in brackets or after "in"."""
    rows = [row.split("|")[column] for row in table.splitlines() if row.startswith("|")]
    return {name.split(".")[-1] for row in rows for name in re.findall(r"(?<!in )(?<!\()`([\w.]+)`", row)}


def test_the_tables_list_every_public_name() -> None:
    """Both tables have all names of the package's door, and names of its rooms' doors alone."""
    communication = names((ROOT / "docs/communication.md").read_text().split("| name | forward | backward |")[1], 1)
    table = names(README.split("\n## Names\n")[1].split("\n## ")[0], 2)
    rooms = [importlib.import_module(f"parallel_layers.{room.name}") for room in iter_modules(parallel_layers.__path__)]
    assert communication == table
    assert set(parallel_layers.__all__) <= table
    assert table <= {name for room in (parallel_layers, *rooms) for name in getattr(room, "__all__", ())}
