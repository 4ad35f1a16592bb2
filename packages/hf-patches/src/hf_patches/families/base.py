"""The dataclasses of an entry in the table of families."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadScaling:
    """The transform of the logits z of the head: softcap * tanh(factor * z / softcap), or factor * z."""

    factor: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Vision:
    """The input of a vision tower: the shape of one patch of pixels, and the patches merged into one token.

    `multi_section`: positions have three more rows (time, height, width), which `get_rope_index` computes.
    """

    multi_section: bool
    patch_shape: Callable[[Any], tuple[int, ...]]
    merge: Callable[[Any], tuple[int, int]]


@dataclass(frozen=True)
class Family:
    """One family of models. Fields with a string hold the name of an attribute of the text config."""

    model_types: tuple[str, ...]
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    # Routed experts: tokens of different sequences share a GEMM, whose rounding depends on all of them.
    experts: bool = False
    # A vision tower besides the text backbone.
    vision: Vision | None = None

    def head_scaling(self, config: Any) -> HeadScaling:
        """Return the factor and soft-cap of one config."""
        factor = 1.0
        if self.logits_multiplier is not None:
            factor *= getattr(config, self.logits_multiplier)
        if self.logits_divisor is not None:
            factor /= getattr(config, self.logits_divisor)
        return HeadScaling(factor, getattr(config, self.logits_softcap) if self.logits_softcap else None)
