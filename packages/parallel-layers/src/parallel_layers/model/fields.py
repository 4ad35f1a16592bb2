"""`Field`: a checked reader of one field of a Hugging Face config. The table of families is made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Config = Mapping[str, Any]

_REQUIRED = object()


class Field:
    """Read one field of a config by calling the `Field` with the config.

    Args:
        fits: Whether a value can be used.
        kind: A text that describes the allowed values.
        names: The names of the field. All names with a value have the same value; null counts as absent.
        default: The value, or a reader of the config, where all names are absent; `_REQUIRED`: absence is an error.
        nullable: A null value is None instead of absent.
        then: A function of the value in the config, whose result is the entry.
    """

    def __init__(
        self,
        fits: Callable[[Any], bool],
        kind: str,
        *names: str,
        default: Any = _REQUIRED,
        nullable: bool = False,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        self.fits, self.kind, self.names, self.default = fits, kind, names, default
        self.nullable, self.then = nullable, then

    def __call__(self, config: Config) -> Any:
        """Return the value; raise ValueError if it is missing, of another kind, or differs under two names."""
        value = self._value(config)
        return value if self.then is None or value is None else self.then(value)

    def _value(self, config: Config) -> Any:
        stated = [name for name in self.names if config.get(name) is not None]
        name = next(iter(stated), self.names[0])
        value: Any = config.get(name)
        if alias := next((alias for alias in stated if config[alias] != value), None):
            raise ValueError(
                f"the config states {name}={value!r:.100} and {alias}={config[alias]!r:.100}, two names of one value; "
                "remove the wrong one"
            )
        if value is None and self.nullable and name in config:
            return None
        if value is None and self.default is not _REQUIRED:
            return read(self.default, config)
        if not self.fits(value):
            raise ValueError(
                f"the config's {name}={value!r:.100} must be {self.kind}; write {name} as transformers does"
            )
        return value


def read(entry: Any, config: Config) -> Any:
    """Return the value of a table's entry under a config: a constant, or the value that a reader returns."""
    return entry(config) if callable(entry) else entry


def _is(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)


count = partial(Field, lambda value: _is(value, int) and value >= 1, "a positive integer")
count_or_zero = partial(Field, lambda value: _is(value, int) and value >= 0, "an integer of at least 0", default=0)
number = partial(Field, lambda value: _is(value, int, float) and value > 0, "a number above 0")
flag = partial(Field, lambda value: _is(value, bool), "true or false", default=False)
name = partial(Field, lambda value: _is(value, str), "a name")
names = partial(Field, lambda value: _is_list(value, str), "a list of names", default=())
indices = partial(Field, lambda value: _is_list(value, int), "a list of integers", default=())
