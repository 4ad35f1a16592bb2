"""The root README's examples run as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_examples_run_as_printed(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) == 5, "one example for each package"
    for number, example in enumerate(examples):
        (tmp_path / f"example_{number}.py").write_text(example)
        command = [sys.executable, f"example_{number}.py"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, example + result.stderr
