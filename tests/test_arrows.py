"""Arrows between packages, circles inside them, and what importing each wheel alone loads."""

import ast
import graphlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "packages"
MODULES = {
    "parallel-layers": "parallel_layers",
    "megatron-utils": "megatron_utils",
    "hf-patches": "hf_patches",
    "ckpt": "ckpt",
    "rl-models": "rl_models",
    "rl-train": "rl_train",
}
# What each package may import of the workspace; everything else among MODULES is refused by ruff.
ARROWS = {
    "parallel-layers": set(),
    "megatron-utils": {"parallel_layers"},
    "hf-patches": {"parallel_layers"},
    "ckpt": set(),
    "rl-models": {"parallel_layers", "megatron_utils", "hf_patches", "ckpt"},
    "rl-train": {"parallel_layers", "ckpt", "rl_models"},
}
# Folders of a package that only an extra's users import, and the extra.
OPTIONAL = {
    "rl-models": {
        "rl_models.engines.megatron": "megatron",
        "rl_models.engines.transformers": "transformers",
        "rl_models.engines.parallel.vision": "transformers",
    }
}

PROBE = Path(__file__).parent / "probe_imports.py"


def project(package: str) -> dict:
    return tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())


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


def modules_of(package: str) -> dict[str, Path]:
    source = PACKAGES / package / "src"
    files = (source / MODULES[package]).rglob("*.py")
    return {".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


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


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for package in MODULES:
        source = tmp_path_factory.mktemp("source") / package
        shutil.copytree(PACKAGES / package, source, ignore=shutil.ignore_patterns("__pycache__"))
        uv("build", "--wheel", "--out-dir", str(out), str(source))
    return out


def uv(*args: str) -> None:
    executable = os.environ.get("UV") or shutil.which("uv")
    assert executable, "uv is not on PATH; install it with `pip install uv`"
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    result = subprocess.run([executable, *args], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", MODULES)
def test_wheel_alone_loads_only_what_it_declares(package: str, wheels: Path, tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text(
        "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"])
    )
    distribution = project(package)["project"]["name"]
    (wheel,) = wheels.glob(f"{distribution.replace('-', '_')}-*.whl")
    python = str(tmp_path / "venv" / "bin" / "python")
    optional = tuple(OPTIONAL.get(package, ()))
    uv("venv", "--quiet", str(tmp_path / "venv"))
    uv("pip", "install", "--quiet", "--python", python, "-c", str(pins), "--find-links", str(wheels), str(wheel))
    result = subprocess.run(
        [python, "-I", str(PROBE), MODULES[package], distribution, *optional],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found["modules"]) == {name for name in modules_of(package) if not name.startswith(optional)}
    assert set(found["loaded"]) <= set(found["required"])
    assert "ray" not in found["loaded"]
    if package == "parallel-layers":
        assert set(found["installed"]) <= {"parallel-layers", *found["torch"]}
        assert {"parallel-layers", "torch"} <= set(found["loaded"])
