"""Who may import whom: ruff refuses a forbidden import, and each wheel alone loads only what it declares."""

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
FORBIDDEN = [
    (package, module)
    for package, allowed in ARROWS.items()
    for module in MODULES.values()
    if module != MODULES[package] and module not in allowed
]

PROBE = Path(__file__).parent / "probe_imports.py"


def project(package: str) -> dict:
    return tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())


@pytest.mark.parametrize(("package", "module"), FORBIDDEN)
def test_ruff_refuses_a_forbidden_import(package: str, module: str) -> None:
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
        input=f"import {module}\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert [finding["code"] for finding in json.loads(result.stdout)] == ["TID251"], result.stdout + result.stderr


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
    uv("venv", "--quiet", str(tmp_path / "venv"))
    uv("pip", "install", "--quiet", "--python", python, "-c", str(pins), "--find-links", str(wheels), str(wheel))
    result = subprocess.run(
        [python, "-I", str(PROBE), MODULES[package], distribution], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    sources = (PACKAGES / package / "src" / MODULES[package]).rglob("*.py")
    assert len(found["modules"]) == len(list(sources)), "a module was not imported"
    assert set(found["loaded"]) <= set(found["required"])
    assert "ray" not in found["loaded"]
    if package == "parallel-layers":
        assert set(found["installed"]) <= {"parallel-layers", *found["torch"]}
        assert {"parallel-layers", "torch"} <= set(found["loaded"])
