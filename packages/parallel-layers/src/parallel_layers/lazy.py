"""`lazy_names`: a door, whose names are listed in its stub `__init__.pyi` and imported when they are first used."""

import ast
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def lazy_names(module: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose stub imports its public names (PEP 562, SPEC 1).

    Type checkers read the same stub, so each name is listed once.

    Args:
        module: The `__name__` of the package.

    Raises:
        AttributeError: By `__getattr__`, for a name that the stub lacks.
    """
    stub = ast.parse(pkgutil.get_data(module, "__init__.pyi") or b"")
    homes = {
        alias.name: str(statement.module)
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(importlib.import_module(module), name, value)
        return value

    names = sorted(homes)
    return names, get, lambda: names
