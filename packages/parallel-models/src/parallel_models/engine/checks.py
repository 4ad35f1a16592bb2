"""Checks of values that a caller gives; errors name the argument."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


def require_number(
    name: str,
    value: object,
    *,
    positive: bool = False,
    at_least: float | None = None,
    integer: bool = False,
    finite: bool = True,
) -> None:
    """Raise ValueError, which names the argument, unless `value` is a number within these bounds."""
    kind = Integral if integer else Real
    text = "an integer" if integer else "a finite number" if finite else "a number"
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} must be {text}, not {type(value).__name__}")
    number = float(value)
    if finite and not math.isfinite(number):
        raise ValueError(f"{name}={value!r} must be {text}")
    if positive and not number > 0:
        raise ValueError(f"{name}={value!r} must be positive")
    if at_least is not None and not number >= at_least:
        raise ValueError(f"{name}={value!r} must be at least {at_least}")


def require_kind(name: str, value: object, kind: type) -> None:
    """Raise ValueError, which names the argument, unless `value` is an instance of a class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} must be {kind.__name__}(...), not {type(value).__name__}")


def options_of(kind: type[T], call: str, options: Mapping[str, Any], others: Iterable[str] = ()) -> T:
    """Return the dataclass `kind` with these fields, the options of a call that also takes `others`.

    Raises:
        ValueError: A name is unknown (the nearest is named), a required field is missing, or `kind` refuses a value.
    """
    known_options = {option.name: option for option in fields(kind)}  # type: ignore[arg-type]
    for name in options:
        if name not in known_options:
            near = difflib.get_close_matches(name, [*known_options, *others], n=1, cutoff=0.0)[0]
            raise ValueError(f"{call} has no option {name!r}; did you mean {near!r}?")
    for name, option in known_options.items():
        if option.default is MISSING and option.default_factory is MISSING and name not in options:
            raise ValueError(f"{call} needs {name}; pass {name}=...")
    return kind(**options)


def require_flags(options: Any) -> None:
    """Raise ValueError unless each flag of a dataclass is True or False: any text would count as True, "no" as well."""
    for flag in fields(options):
        value = getattr(options, flag.name)
        may_be_none = flag.type == "bool | None"
        if (flag.type == "bool" or may_be_none) and not isinstance(value, bool) and not (may_be_none and value is None):
            raise ValueError(f"{flag.name}={value!r} must be True or False{', or None' * may_be_none}")
