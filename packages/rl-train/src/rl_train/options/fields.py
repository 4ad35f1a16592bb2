"""Types of options: what a file or a command line may give for them, and marks that say more about an option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

T = TypeVar("T")

# Options are checked strictly: "3" is no number, and 1 is no flag.
# The validators are built when they are first used, which `--help` never does.
CONFIG = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    defer_build=True,
)


class MayChange:
    """Mark an option that may change when a run is resumed."""


class Repeats:
    """Mark an option that may be given several times on the command line."""


def as_text(value: Any) -> Any:
    """Return the text of a grid or of ids that a file gives as a mapping or a list, such as {tp: 2} or [2, 7]."""
    if isinstance(value, dict):
        return ",".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if type(value) is int else value


def _as_number(value: Any) -> Any:
    """Return the number of a text: YAML reads 1e-5 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Free = Annotated[T, MayChange]
Text = Annotated[str, BeforeValidator(as_text)]
Folder = Annotated[Path, Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_as_number)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
