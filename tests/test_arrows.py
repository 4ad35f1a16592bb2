"""Arrows between packages, circles inside them, and what importing each wheel alone loads."""

import ast
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
        "rl_models.engines.parallel.tower": "transformers",
        "rl_models.engines.parallel.vision": "transformers",
    }
}

# The packages as docs/release.md lists them: each stands behind those that it needs.
ORDER = ("parallel-layers", "ckpt", "megatron-utils", "hf-patches", "rl-models", "rl-train")
RELEASE = ROOT / "docs" / "release.md"
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


def row(metadata: Message) -> str:
    """The row of docs/release.md of a package with this metadata, that of a wheel or of a pyproject.toml."""
    needs: list[str] = []
    extras: dict[str, list[str]] = {name: [] for name in metadata.get_all("Provides-Extra", [])}
    for line in metadata.get_all("Requires-Dist", []):
        need = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(need.marker))
        asked_for = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
        (extras[extra[1]] if extra else needs).append(f"`{need.name}{asked_for}{need.specifier}`")
    of_extras = "; ".join(f"`{name}`: {', '.join(found)}" for name, found in sorted(extras.items()))
    python = f"`{metadata['Requires-Python']}`"
    return f"| {metadata['Name']} | {metadata['Version']} | {python} | {', '.join(needs)} | {of_extras} |"


def declared(package: str) -> Message:
    """The metadata that the pyproject.toml of a package declares, in the form of a wheel's."""
    given, found = project(package)["project"], Message()
    for name, value in (("Name", "name"), ("Version", "version"), ("Requires-Python", "requires-python")):
        found[name] = given[value]
    for need in given["dependencies"]:
        found["Requires-Dist"] = need
    for extra, needs in given.get("optional-dependencies", {}).items():
        found["Provides-Extra"] = extra
        for need in needs:
            base, _, marker = need.partition(";")
            found["Requires-Dist"] = f"{base}; {f'({marker}) and ' if marker else ''}extra == '{extra}'"
    return found


def test_the_table_of_versions_is_that_of_the_packages() -> None:
    """Packages need each other in the minor version that they have; the table says so."""
    rows = [row(declared(package)) for package in ORDER]
    version = {project(package)["project"]["name"]: project(package)["project"]["version"] for package in ORDER}
    for package in ORDER:
        for line in declared(package).get_all("Requires-Dist", []):
            need = Requirement(line)
            assert need.name not in version or need.specifier.contains(version[need.name]), (package, line)
            assert need.name not in version or len(need.specifier) == 2, f"{package}: {line} lacks a bound"
    print("\n".join(rows))
    table = RELEASE.read_text().split("|---|---|---|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == rows, "replace the table in docs/release.md by the one above"


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


def uv(*args: str) -> None:
    executable = os.environ.get("UV") or shutil.which("uv")
    assert executable, "uv is not on PATH; install it with `pip install uv`"
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    result = subprocess.run([executable, *args], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", MODULES)
def test_a_copied_package_can_be_installed(package: str, copies: Path, tmp_path: Path) -> None:
    """Nothing in a package's pyproject.toml names the workspace, whose root holds the sources of all members."""
    uv("pip", "install", "--no-deps", "--target", str(tmp_path), str(copies / package))
    assert (tmp_path / MODULES[package] / "__init__.py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("package", MODULES)
def test_the_metadata_of_a_wheel_are_those_of_the_site(package: str, wheels: Path) -> None:
    distribution = project(package)["project"]["name"]
    (wheel,) = wheels.glob(f"{distribution.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(files.read(name).decode())
    assert row(metadata) in RELEASE.read_text().splitlines()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload() == (PACKAGES / package / "README.md").read_text()
    # The site has an address as soon as the wheels name one, and the same one.
    site = re.findall(r"^(?:site|repo)_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(url.split(", ")[1] for url in metadata.get_all("Project-URL", [])) == sorted(site)


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
