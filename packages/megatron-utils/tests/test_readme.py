"""The README's example runs as printed, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(example)
    command = [sys.executable, "-W", "ignore", "train.py"]
    # One thread: the session's ranks share the cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr
    found = re.search(r"loss ([\d.]+), gradient norm ([\d.]+), learning rate 6\.16e-05", result.stdout)
    assert found, result.stdout
    assert float(found[1]) < 1.0
