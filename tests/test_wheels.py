"""Each wheel, alone in a bare environment, holds what it declares and does the job of its README."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email import message_from_string
from functools import cache
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tests.distributions import MODULES, PACKAGES, ROOT, closure, floors, modules_of, project
from tests.test_metadata import RELEASE, row

JOBS = Path(__file__).parent / "wheel_jobs"
PROBE = Path(__file__).parent / "probe_imports.py"
# Modules of a package that only users of an extra, of pytest, or of a newer version of a library import.
OPTIONAL = {
    "megatron-utils": ("megatron_utils.hybrid.model",),
    "parallel-layers": ("parallel_layers.testing.fixtures",),
    "rl-models": (
        "rl_models.backends.megatron",
        "rl_models.backends.transformers",
        "rl_models.backends.parallel.tower",
        "rl_models.backends.parallel.vision",
    ),
}


def uv(*args: str) -> None:
    executable = os.environ.get("UV") or shutil.which("uv")
    assert executable, "uv is not on PATH; install it with `pip install uv`"
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    # Beside the packages uv would read the pins of the workspace.
    result = subprocess.run(
        [executable, "--no-config", *args], capture_output=True, text=True, cwd="/", env=environment
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the workspace with a copy of each package."""
    folder = tmp_path_factory.mktemp("copies")
    for package in MODULES:
        shutil.copytree(PACKAGES / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def wheels(copies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for package in MODULES:
        uv("build", "--wheel", "--out-dir", str(out), str(copies / package))
    return out


def wheel_of(package: str, wheels: Path) -> Path:
    (wheel,) = wheels.glob(f"{project(package)['name'].replace('-', '_')}-*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize("package", MODULES)
def test_a_copied_package_can_be_installed(package: str, copies: Path, tmp_path: Path) -> None:
    """Nothing in a package's pyproject.toml names the workspace, whose root holds the sources of all members."""
    uv("pip", "install", "--no-deps", "--target", str(tmp_path), str(copies / package))
    assert (tmp_path / MODULES[package] / "__init__.py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("package", MODULES)
def test_the_metadata_of_a_wheel_are_those_of_the_site(package: str, wheels: Path) -> None:
    with zipfile.ZipFile(wheel_of(package, wheels)) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(files.read(name).decode())
    assert row(metadata) in RELEASE.read_text().splitlines()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload() == (PACKAGES / package / "README.md").read_text()
    # The site has an address as soon as the wheels name one, and the same one.
    site = re.findall(r"^(?:site|repo)_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(url.split(", ")[1] for url in metadata.get_all("Project-URL", [])) == sorted(site)


@pytest.fixture(scope="session")
def install(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`install("pinned", "ckpt")`: the folder of programs of an environment with this wheel and what it needs alone.

    The packages take turns in one environment for each choice of versions: what Python has compiled of torch stays.
    """

    pins = tmp_path_factory.mktemp("pins") / "constraints.txt"
    pins.write_text(
        "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"])
    )

    def versions(bound: str, package: str) -> list[str]:
        if bound == "floor":  # of all that is named here; what those need in turn is as new as they allow
            return ["--resolution=lowest-direct", *map(str, closure(package)[1])]
        return [f"--constraints={pins}"] if bound == "pinned" else []

    @cache
    def environment(bound: str) -> Path:
        folder = tmp_path_factory.mktemp(bound) / "venv"
        uv("venv", "--quiet", "--python", sys.executable, str(folder))
        return folder / "bin"

    def prepare(bound: str, package: str) -> Path:
        programs, wheel = environment(bound), wheel_of(package, wheels)
        links = [str(wheels), *filter(None, os.environ.get("UV_FIND_LINKS", "").split(","))]
        options = [f"--find-links={link}" for link in links]
        # --exact takes away what the last package brought, and --upgrade forgets its versions.
        exact = ["--exact", "--upgrade", f"--python={programs}/python"]
        uv("pip", "install", *exact, *options, *versions(bound, package), str(wheel))
        return programs

    return prepare


def run(*command: str, programs: Path, folder: Path) -> str:
    """Return what a command prints; it finds the programs of a bare environment first, and no settings of Python's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "UV_"))}
    settings = {"PATH": f"{programs}:{os.environ['PATH']}", "JOBS": str(JOBS), "COLUMNS": "100"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=kept | settings, timeout=560)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("package", MODULES)
@pytest.mark.parametrize("bound", ["pinned", "floor", "newest"])
def test_a_wheel_alone_does_the_job_of_its_readme(
    bound: str, package: str, install: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """The wheel loads nothing that it does not declare, and wheel_jobs/PACKAGE.sh runs."""
    optional = OPTIONAL.get(package, ())
    programs = install(bound, package)
    probe = ["python", "-I", str(PROBE), MODULES[package], project(package)["name"], *optional]
    found = json.loads(run(*probe, programs=programs, folder=tmp_path))
    assert set(found["modules"]) == {name for name in modules_of(package) if not name.startswith(optional)}
    assert set(found["loaded"]) <= set(found["required"])
    assert set(found["installed"]) <= set(found["required"])
    if bound == "floor":
        versions = {name: found["versions"][name] for name in floors(package)}
        wrong = {
            name for name, version in versions.items() if version not in SpecifierSet(f"=={floors(package)[name]}.*")
        }
        assert not wrong, versions
    (program,) = re.findall(r"^```python\n(.*?)^```", (PACKAGES / package / "README.md").read_text(), re.M | re.S)
    (tmp_path / "readme.py").write_text(program)
    run("bash", "-euxo", "pipefail", str(JOBS / f"{package}.sh"), programs=programs, folder=tmp_path)
