"""Arrows between packages, circles of imports inside them, and the length of their files."""

import ast
import graphlib
import json
import subprocess
import sys

import pytest
from tests.distributions import MODULES, PACKAGES, ROOT, modules_of

# What each package may import of the workspace; everything else among MODULES is refused by ruff.
ARROWS = {
    "parallel-layers": set(),
    "megatron-utils": {"parallel_layers"},
    "hf-patches": {"parallel_layers"},
    "ckpt": set(),
    "parallel-models": {"parallel_layers", "ckpt"},
    "rl-models": {"parallel_layers", "megatron_utils", "hf_patches", "ckpt", "parallel_models"},
    "rl-train": {"parallel_layers", "ckpt", "parallel_models", "rl_models"},
}


@pytest.mark.parametrize("package", MODULES)
def test_ruff_refuses_a_forbidden_import(package: str) -> None:
    forbidden = set(MODULES.values()) - ARROWS[package] - {MODULES[package]}
    where = PACKAGES / package / "src" / MODULES[package] / "probe.py"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--select",
            "TID251",
            "--output-format",
            "json",
            "--stdin-filename",
            str(where),
            "-",
        ],
        input="".join(f"import {module}\n" for module in forbidden),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    found = [(finding["code"], finding["location"]["row"]) for finding in json.loads(result.stdout)]
    assert sorted(found) == [("TID251", row) for row in range(1, len(forbidden) + 1)], result.stdout + result.stderr


def imports_of(package: str) -> dict[str, set[str]]:
    """For each module of a package the modules of the same package that it imports, wherever in the file."""
    modules = modules_of(package)
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom):
                wanted = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= (wanted & modules.keys()) or ({str(node.module)} & modules.keys())
    return found


@pytest.mark.parametrize("package", MODULES)
def test_no_circle_of_imports(package: str) -> None:
    """Imports inside functions and those for types alone count, too. A package's `__init__` may name its modules."""
    try:
        graphlib.TopologicalSorter(imports_of(package)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("package", MODULES)
def test_no_file_is_long(package: str) -> None:
    long = {name: len(file.read_text().splitlines()) for name, file in modules_of(package).items()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}
