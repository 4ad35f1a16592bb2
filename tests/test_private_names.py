"""Names that torch marks as private stand in a table with their users; this file says what broke when torch changes."""

from __future__ import annotations

import ast
import inspect
import operator
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.distributions import MODULES, modules_of

TABLE = tomllib.loads((Path(__file__).parent / "private_names.toml").read_text())


# Our names of torch's modules.
OURS = dict.fromkeys(("parallel_layers.device.gpu", "parallel_layers.device.gpus.gpu", "ckpt.device.gpu"), "torch.cuda")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the private names of torch that a module reaches through an import, each with its function or class."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            aliases |= {name: OURS.get(path, path) for name, path in paths.items()}

    def visit(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = f"{place}.{node.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", "import") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            path, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                path, inner = [inner.attr, *path], inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases:
                if any(map(is_private, path)):
                    yield ".".join((aliases[inner.id], *path)), place.removeprefix(".") or "import"
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, place)

    for name, place in visit(tree, ""):
        if name.startswith("torch.") and any(map(is_private, name.split("."))):
            yield name, place


@pytest.mark.slow  # `.ci/run` has it
def test_the_table_names_every_use_of_a_private_name() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for package in MODULES:
        for module, file in modules_of(package).items():
            for name, place in private_names(ast.parse(file.read_text())):
                users[name].add(module if place == "import" else f"{module}.{place}")
    listed = {name: set(row["users"]) for name, row in TABLE.items() if "attribute" not in row}
    assert listed == dict(users), "correct tests/private_names.toml"


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if "attribute" in row])
def test_the_users_of_an_attribute_read_it(name: str) -> None:
    files = {module: file for package in MODULES for module, file in modules_of(package).items()}
    for user in TABLE[name]["users"]:
        module = max((module for module in files if user.startswith(f"{module}.")), key=len)
        function = user.rpartition(".")[2]
        nodes = [
            node for node in ast.walk(ast.parse(files[module].read_text())) if getattr(node, "name", "") == function
        ]
        read = {node.attr for node in ast.walk(nodes[0]) if isinstance(node, ast.Attribute)}
        quoted = {node.value for node in ast.walk(nodes[0]) if isinstance(node, ast.Constant)}
        assert name.rpartition(".")[2] in read | quoted, user


def resolved(name: str) -> Any:
    """Return the object of a dotted name: a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return operator.attrgetter(".".join(parts[length:]))(module) if parts[length:] else module
    raise AttributeError(name)


def parameters(function: Any) -> set[str]:
    """Return the names of the parameters of a Python function or of an operator of torch."""
    if hasattr(function, "overloads"):
        schemas = [getattr(function, overload)._schema for overload in function.overloads()]
        return {argument.name for schema in schemas for argument in schema.arguments}
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", TABLE)
def test_torch_still_has_the_name(name: str) -> None:
    import torch

    row = TABLE[name]
    told = f"torch {torch.__version__}: {name} serves {row['purpose']} in {', '.join(row['users'])}"
    owner, _, attribute = name.rpartition(".")
    try:
        if "attribute" in row and f"self.{attribute}" in inspect.getsource(resolved(owner)):
            return
    except (OSError, TypeError):
        pass  # a class of C++
    try:
        thing = resolved(name)
    except AttributeError as error:
        pytest.fail(f"{told}, and is gone: {error}")
    if "parameters" in row:
        missing = set(row["parameters"]) - parameters(thing)
        assert not missing, f"{told}, and has no parameters {sorted(missing)} any more"
