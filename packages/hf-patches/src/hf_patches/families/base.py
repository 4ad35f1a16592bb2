"""The form of a family's entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadScaling:
    """What a model does to the logits z of its head: softcap * tanh(factor * z / softcap), or factor * z."""

    factor: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Vision:
    """What a family's vision tower takes: the shape of one patch's pixels and the patches merged into one token.

    `multi_section`: text positions have three further rows (time, height, width), and `get_rope_index` computes them.
    """

    multi_section: bool
    patch_shape: Callable[[Any], tuple[int, ...]]
    merge: Callable[[Any], tuple[int, int]]


@dataclass(frozen=True)
class Family:
    """One family of models. Fields that name something name an attribute of the text config."""

    model_types: tuple[str, ...]
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    # Routed experts: tokens of different sequences meet in one matrix product, whose rounding depends on all of them.
    experts: bool = False
    # A vision tower besides the text backbone.
    vision: Vision | None = None

    def head_scaling(self, config: Any) -> HeadScaling:
        """The numbers of one config."""
        factor = 1.0
        if self.logits_multiplier is not None:
            factor *= getattr(config, self.logits_multiplier)
        if self.logits_divisor is not None:
            factor /= getattr(config, self.logits_divisor)
        return HeadScaling(factor, getattr(config, self.logits_softcap) if self.logits_softcap else None)
