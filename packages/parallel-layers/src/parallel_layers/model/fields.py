"""`Field`: a checked reader of one field of a Hugging Face config. The table of families is made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Config = Mapping[str, Any]

_REQUIRED = object()


def _is_number(value: Any, kinds: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)


# Kind of a field -> whether a value is of this kind, and the kind in words.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: _is_number(value, int) and value >= 1, "a positive integer"),
    "count or zero": (lambda value: _is_number(value, int) and value >= 0, "an integer of at least 0"),
    "number": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "name": (lambda value: isinstance(value, str), "a name"),
    "names": (lambda value: _is_list(value, str), "a list of names"),
    "indices": (lambda value: _is_list(value, int), "a list of layer indices"),
}


class Field:
    """Read one field of a config by calling the `Field` with the config.

    Args:
        kind: A key of `_KINDS`.
        names: The names of the field; the first with a value counts. A null value counts as absent.
        default: The value, or a reader of the config, where all names are absent; `_REQUIRED`: absence is an error.
    """

    def __init__(self, kind: str, *names: str, default: Any = _REQUIRED) -> None:
        self.kind, self.names, self.default = kind, names, default

    def __call__(self, config: Config) -> Any:
        """Return the value.

        Raises:
            ValueError: The value is missing or of another kind.
        """
        name = next((name for name in self.names if config.get(name) is not None), self.names[0])
        value: Any = config.get(name)
        if value is None and self.default is not _REQUIRED:
            return read(self.default, config)
        fits, kind = _KINDS[self.kind]
        if not fits(value):
            raise ValueError(f"the config's {name}={value!r:.100} must be {kind}; write {name} as transformers does")
        return float(value) if self.kind == "number" else value


count = partial(Field, "count")
count_or_zero = partial(Field, "count or zero", default=0)
number = partial(Field, "number")
flag = partial(Field, "flag", default=False)
name = partial(Field, "name")
names = partial(Field, "names", default=())
indices = partial(Field, "indices", default=())


def read(entry: Any, config: Config) -> Any:
    """Return the value of a table's entry under a config: a constant, or what a reader finds."""
    return entry(config) if callable(entry) else entry
