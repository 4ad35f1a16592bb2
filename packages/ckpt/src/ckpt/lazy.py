"""`lazy_names`: a door, whose names are listed in its stub `__init__.pyi` and imported when they are first used."""

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

_DISTRIBUTIONS = {"ckpt": "rl-ckpt"}
"""The distributions of modules that have another name."""


def lazy_names(module: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose stub imports its public names (PEP 562, SPEC 1).

    Type checkers read the same stub, so each name is listed once.

    Args:
        module: The `__name__` of the package.

    Raises:
        AttributeError: By `__getattr__`, for a name that the stub lacks.
        ImportError: By `__getattr__`, as `check_requirements`.
    """
    stub = ast.parse(pkgutil.get_data(module, "__init__.pyi") or b"")
    package = module.partition(".")[0]
    homes = {
        alias.name: str(statement.module)
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        check_requirements(_DISTRIBUTIONS.get(package, package.replace("_", "-")))
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(importlib.import_module(module), name, value)
        return value

    names = sorted(homes)
    return names, get, lambda: names


@functools.cache
def check_requirements(distribution: str) -> None:
    """Compare the installed libraries with the bounds in a distribution's metadata; extras are left out.

    pip and uv refuse other versions, unless they are told to.

    Raises:
        ImportError: As `check_version`.
    """
    try:
        lines = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return  # run from a folder of sources
    for line in lines:
        if need := re.fullmatch(r"([\w.-]+)(?:\[.*\])?([<>=\d.,]+)", line.replace(" ", "")):
            check_version(distribution, need[1], need[2])


def check_version(needed_by: str, name: str, bounds: str) -> None:
    """Check an installed library, such as `torch`, against bounds, such as `>=2.11,<2.16`.

    Raises:
        ImportError: The version is outside; names it, the bounds, and the command that installs one inside.
    """
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return  # its import says so
    for bound in bounds.split(","):
        limit = _release(bound)
        release = _release(installed)[: len(limit)]
        if not (release < limit if bound[0] == "<" else release >= limit):
            command = f'pip install "{name}{bounds}"'
            raise ImportError(f"{name} {installed} is installed, and {needed_by} supports {bounds}: {command}")


def _release(version: str) -> list[int]:
    match = re.search(r"\d+(\.\d+)*", version)
    return [int(number) for number in match[0].split(".")] if match else []
