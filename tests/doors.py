"""The doors of the packages: which modules are doors, which names they have, and how these names are called."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from tests.distributions import MODULES, PACKAGES


def source(package: str) -> Path:
    return PACKAGES / package / "src"


@cache
def doors_of(package: str) -> dict[str, dict[str, str]]:
    """Return the names of each door of a package with the modules that define them, as its stub lists them.

    Raises:
        AssertionError: A stub gives another name than the door does: "import a as b", or "import a", which hides a.
    """
    doors = {}
    for stub in sorted((source(package) / MODULES[package]).rglob("__init__.pyi")):
        module = ".".join(stub.relative_to(source(package)).parent.parts)
        imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
        for alias in (alias for node in imports for alias in node.names):
            assert alias.asname == alias.name, f"{stub}: write `import {alias.name} as {alias.name}`"
        doors[module] = {alias.name: str(node.module) for node in imports for alias in node.names}
    return doors


@cache
def _nodes(code: str) -> list[ast.AST]:
    """Return the imports and attributes of a program."""
    kinds = ast.ImportFrom, ast.Import, ast.Attribute
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]


def imports_of(code: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) of every import of the workspace's packages in a program; "" for `import module`."""
    for node in _nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES.values():
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES.values():
                    yield node.lineno, alias.name, ""


def uses_of(code: str) -> set[str]:
    """Return the dotted names that a program imports from the workspace, and reads as attributes of such names."""
    bound = {}
    for _, module, name in imports_of(code):
        bound |= {name: f"{module}.{name}"} if name else {module.split(".")[0]: module.split(".")[0]}
    used = {*bound.values()}
    for node in _nodes(code):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in bound:
            used.add(".".join((bound[node.id], *reversed(names))))
    return used


@cache
def _packages() -> Any:
    """Return the definitions of all packages, read and not imported."""
    loader = griffe.GriffeLoader(search_paths=[source(name) for name in MODULES], allow_inspection=False)
    for module in MODULES.values():
        loader.load(module)
    return loader.modules_collection


def signatures(package: str) -> dict[str, list[str]]:
    """Return how the names of each door are called: functions, and the fields and public methods of classes."""
    return {
        f"{door}.{name}": list(_lines(_packages()[f"{home}.{name}"]))
        for door, names in doors_of(package).items()
        for name, home in names.items()
    }


def _lines(thing: Any) -> Iterator[str]:
    if thing.is_alias:
        yield f"{thing.name} = {thing.target_path}"
    elif thing.is_function:
        yield thing.signature()
    elif thing.is_class:
        yield f"class {thing.name}({', '.join(map(str, thing.bases))})"
        for name, member in thing.members.items():
            if member.is_alias or (name.startswith("_") and name != "__init__"):
                continue
            if member.is_function:
                yield f"  {member.signature()}"
            elif member.is_attribute and member.annotation is not None:
                yield f"  {name}: {member.annotation}" + ("" if member.value is None else f" = {member.value}")
    else:
        yield thing.name


def changelog(package: str) -> str:
    """Return a digest of a package's changelog."""
    return hashlib.blake2b((PACKAGES / package / "CHANGELOG.md").read_bytes(), digest_size=8).hexdigest()
