"""Parse options that are texts of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from parallel_layers.memory.recompute import Recompute


def parse_recompute(text: str | None) -> Recompute:
    """Parse "full", "selective" or numbers of layers with commas for `Actor.from_pretrained(recompute=...)`."""
    if text is None or text in ("full", "selective"):
        return cast("Recompute", text)
    return numbers("recompute", text, "full, selective, or ")


def numbers(name: str, text: str, otherwise: str = "") -> tuple[int, ...]:
    """Parse the numbers of a text such as "2,7"; `otherwise` names the option's other values."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{name}={text!r} must be {otherwise}numbers with commas, such as 2,7") from None
