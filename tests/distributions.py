"""The names, versions, requirements and extras that the packages of the workspace declare."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "packages"
# The folder of each package and its module. Each package stands behind those that it needs.
MODULES = {
    "parallel-layers": "parallel_layers",
    "ckpt": "ckpt",
    "megatron-utils": "megatron_utils",
    "hf-patches": "hf_patches",
    "parallel-models": "parallel_models",
    "rl-models": "rl_models",
    "rl-train": "rl_train",
}


def project(package: str) -> dict[str, Any]:
    """Return the table `project` of a package's pyproject.toml."""
    return tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]


FOLDERS = {project(package)["name"]: package for package in MODULES}


def requirements(package: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """Return what a package and its extras need, the packages of the workspace among them."""
    declared = project(package)
    optional = declared.get("optional-dependencies", {})
    return [
        Requirement(line) for line in (*declared["dependencies"], *(line for name in extras for line in optional[name]))
    ]


def closure(package: str, extras: frozenset[str] = frozenset()) -> tuple[set[str], list[Requirement]]:
    """Return the folders of the packages that one brings, itself included, and all that these need from elsewhere."""
    folders, outside = {package}, []
    for need in requirements(package, extras):
        if need.name in FOLDERS:
            inner, more = closure(FOLDERS[need.name], frozenset(need.extras))
            folders |= inner
            outside += more
        else:
            outside.append(need)
    return folders, outside


def floors(package: str) -> dict[str, str]:
    """Return the lowest versions of torch and of what a package itself needs from elsewhere, as its bounds allow."""
    needs = [need for need in requirements(package) if need.name not in FOLDERS]
    needs += [need for need in closure(package)[1] if need.name == "torch"]
    return {need.name: bound.version for need in needs for bound in need.specifier if bound.operator == ">="}


@cache
def modules_of(package: str) -> dict[str, Path]:
    """Return the file of each module of a package."""
    source = PACKAGES / package / "src"
    files = (source / MODULES[package]).rglob("*.py")
    return {".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
