"""`Field`: a checked reader of one field of a Hugging Face config. The tables of families are made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

_REQUIRED = object()


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Kind of a field -> whether a value is of this kind, and the kind in words.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: _is_integer(value) and value >= 1, "a positive integer"),
    "count or zero": (lambda value: _is_integer(value) and value >= 0, "an integer of at least 0"),
    "number": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "name": (lambda value: isinstance(value, str), "a name"),
}


@dataclass(frozen=True)
class Field:
    """Read one field of a config by calling the `Field` with the config.

    Attributes:
        kind: A key of `_KINDS`.
        names: The names of the field; the first with a value counts. A null value counts as absent.
        default: The value, or a reader of the config, where all names are absent; `_REQUIRED`: absence is an error.
    """

    kind: str
    names: tuple[str, ...]
    default: Any = _REQUIRED

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


def count(*names: str, default: Any = _REQUIRED) -> Field:
    """Return a reader of a positive integer."""
    return Field("count", names, default)


def count_or_zero(*names: str) -> Field:
    """Return a reader of an integer that may be absent, which reads as 0."""
    return Field("count or zero", names, 0)


def number(name: str, default: Any = _REQUIRED) -> Field:
    """Return a reader of a number above 0."""
    return Field("number", (name,), default)


def flag(name: str, default: bool = False) -> Field:
    """Return a reader of true or false."""
    return Field("flag", (name,), default)


def name(name: str, default: str) -> Field:
    """Return a reader of a string."""
    return Field("name", (name,), default)


def read(value: Any, config: Config) -> Any:
    """Return the value that a table's entry has under a config: a constant, or what a reader finds."""
    return value(config) if callable(value) else value
