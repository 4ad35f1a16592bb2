"""Parse options that are texts: numbers, dtypes and recipes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from parallel_layers.memory import Recompute


def parse_recompute(text: str | None) -> Recompute:
    """Parse "full", "selective" or numbers of layers with commas for `Actor.from_pretrained(recompute=...)`."""
    if text is None or text in ("full", "selective"):
        return cast("Recompute", text)
    return numbers("recompute", text, "full, selective, or ")


def numbers(name: str, text: str, other_values: str = "") -> tuple[int, ...]:
    """Parse the numbers of a text such as "2,7" or "0-5,8"; `other_values` names the option's other values."""
    values: list[int] = []
    try:
        for entry in text.split(","):
            if span := re.fullmatch(r"\s*(\d{1,6})-(\d{1,6})\s*", entry):
                first, last = map(int, span.groups())
                if last < first:
                    raise ValueError(entry)
                values += range(first, last + 1)
            elif entry.strip():
                values.append(int(entry))
    except ValueError:
        raise ValueError(f"{name}={text!r} must be {other_values}numbers with commas, such as 2,7 or 0-5,8") from None
    return tuple(values)


def parse_float8(recipe: str | None) -> str | None:
    """Return the recipe of `--float8`; ValueError for an unknown recipe."""
    from parallel_layers.linear import RECIPES  # imports torch, which `--help` must not do

    if recipe not in (None, *RECIPES):
        raise ValueError(f"float8={recipe!r} must be one of {', '.join(RECIPES)}")
    return recipe


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name on the command line."""
    import torch  # takes seconds; `--help` does not import it

    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype={name!r} must be float32 or bfloat16")
    return known[name]
