"""`.ci/upstream`: its rows cover what the packages declare, the page has its table, and what cannot run is said."""

from __future__ import annotations

import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet
from tests.distributions import MODULES, ROOT, project, requirements


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, which writes to a copy of the page."""
    loader = SourceFileLoader("upstream", str(ROOT / ".ci" / "upstream"))
    spec = spec_from_loader("upstream", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "upstream", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    module.PAGE = tmp_path / "install.md"
    module.PAGE.write_text((ROOT / "docs" / "install.md").read_text())
    module.untested_versions = module.untested
    monkeypatch.setattr(module, "untested", lambda: "")
    return module


def test_the_rows_are_those_of_the_page(upstream: ModuleType) -> None:
    before = upstream.PAGE.read_text()
    upstream.write({}, upstream.rows())
    assert upstream.PAGE.read_text() == before, "run `.ci/upstream` for the new rows"


def test_every_supported_version_has_a_row(upstream: ModuleType) -> None:
    rows = upstream.rows()
    oldest, above = (int(version.rpartition(".")[2]) for version in upstream.bounds("megatron-utils", "megatron-core"))
    cores = {row.removeprefix("megatron-core-") for row in rows if row.startswith("megatron-core-")}
    assert cores == {f"0.{minor}" for minor in range(oldest, above)}
    # `.ci/run` has Python 3.11, whose Megatron-Core has no hybrid models.
    runs = rows[f"megatron-core-0.{above - 1}"].runs
    assert {"packages/megatron-utils", "tests/test_hybrids_on_megatron.py"} <= set(runs)
    assert all((ROOT / run).exists() for run in runs)
    for package in MODULES:
        declared = project(package)
        pythons = [line.rpartition(" ")[2] for line in declared["classifiers"] if "Python ::" in line]
        assert tuple(pythons) == upstream.PYTHONS
        assert all(python in SpecifierSet(declared["requires-python"]) for python in upstream.PYTHONS)
        assert "3.14" not in SpecifierSet(declared["requires-python"])
    floors = {"torch": ("parallel-layers", "torch-floor"), "transformers": ("hf-patches", "transformers-floor")}
    for name, (package, row) in floors.items():
        (need,) = (need for need in requirements(package) if need.name == name)
        (floor,) = (bound.version for bound in need.specifier if bound.operator == ">=")
        assert rows[row].libraries[0].startswith(f"{name}=={floor}")


def test_what_cannot_run_is_said(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upstream, "interpreter", lambda python: None)
    assert upstream.main(["python-3.13"]) == 0
    assert "| python-3.13 | 3.13 |  |  |  |  | not run: no Python 3.13 here |  |" in upstream.PAGE.read_text()
    monkeypatch.setattr(upstream, "interpreter", lambda python: sys.executable)
    monkeypatch.setattr(upstream, "install", lambda *_: "no such version")
    assert upstream.main(["python-3.13"]) == 0
    assert "| not run: cannot be installed |  |" in upstream.PAGE.read_text()
    assert upstream.main(["python-2"]) == 2
    assert "no rows ['python-2']" in capsys.readouterr().out


def test_a_failing_row_fails(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho '1 failed, 3 passed in 2s'\nexit 1\n")
    program.chmod(0o755)
    row = upstream.Row(f"{sys.version_info.major}.{sys.version_info.minor}", (), (), (str(program),))
    monkeypatch.setattr(upstream, "rows", lambda: {"python-3.11": row})
    assert upstream.main(["python-3.11"]) == 1
    assert "| 1 failed, 3 passed |" in upstream.PAGE.read_text()


def test_versions_above_the_bounds_are_said(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of a night ended here with an error, since the bounds of vLLM stood in another file."""
    answer = CompletedProcess([], 0, stdout="name (99.0.1)")
    monkeypatch.setattr(upstream.subprocess, "run", lambda *_, **__: answer)
    said = upstream.untested_versions()
    for name in ("torch", "transformers", "megatron-core", "vllm"):
        assert re.search(rf"{name} 99\.0\.1 \(we take <[\d.]+\)", said)
