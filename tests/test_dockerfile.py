"""The image: hadolint finds no fault, it holds every package, and it runs the first command of the README as a user."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
# (instruction, arguments), with continued lines joined.
INSTRUCTIONS = [
    tuple(line.split(" ", 1)) for line in TEXT.replace("\\\n", "").splitlines() if line and not line.startswith("#")
]


def arguments(name: str) -> list[str]:
    return [text for instruction, text in INSTRUCTIONS if instruction == name]


def test_hadolint_finds_no_fault() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    checked = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], text=True, capture_output=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_image_is_pinned_and_keeps_no_cache() -> None:
    (base,) = arguments("FROM")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert arguments("ARG") == ["TORCH=cu130"]
    runs = " && ".join(arguments("RUN")).split("&&")
    installs = [run for run in runs if re.search(r"\b(pip|apt-get) install", run)]
    assert len(installs) == 3
    for run in installs:
        assert "--no-cache" in run or "--no-install-recommends" in run
    assert any("rm -rf /var/lib/apt/lists" in run for run in runs)
    assert '--torch-backend "$TORCH"' in TEXT


def test_the_image_holds_every_package_once() -> None:
    (install,) = (run for run in arguments("RUN") if "uv pip install" in run)
    named = [word.partition("[")[0] for word in shlex.split(install) if word.startswith("./packages/")]
    assert sorted(named) == sorted(f"./packages/{folder.name}" for folder in (ROOT / "packages").iterdir())


def test_the_container_runs_the_first_command_without_root() -> None:
    assert INSTRUCTIONS[-1] == ("CMD", '["rl-train", "quickstart"]')
    first = re.search(r"^uv run (.*)$", (ROOT / "README.md").read_text(), re.M)
    assert first is not None
    assert first.group(1) == "rl-train quickstart"
    assert arguments("USER") == ["1000"]
