"""The schedule of the learning rate, and the parameters that weight decay applies to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # options of the learning rate, and so `--help`, are read without torch
    from torch import Tensor

# Kind: its required fields.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("total_steps",),
    "cosine": ("total_steps",),
    "wsd": ("total_steps", "decay_steps"),
    "inverse-sqrt": (),
}


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate at each step.

    Steps count from 0. With w = warmup_steps, N = total_steps, m = min_ratio and x = (step - w) / (N - w):

        warm-up         (step + 1) / w for step < w; then
        constant        1
        linear          m + (1 - m) (1 - x)
        cosine          m + (1 - m) (1 + cos(pi x)) / 2    (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)
        wsd             1, and over the last `decay_steps`, with y from 0 to 1, m + (1 - m) (1 - y): warm-up, stable,
                        decay (Hu et al. 2024, arXiv:2404.06395, section 4.2)
        inverse-sqrt    max(m, sqrt(max(w, 1) / (step + 1)))    (Vaswani et al. 2017, arXiv:1706.03762, eq. 3)

    The factor is constant after `total_steps`.

    Attributes:
        kind: The shape over time: "constant", "linear", "cosine", "wsd" or "inverse-sqrt".
        warmup_steps: Steps in which the factor rises to 1.
        total_steps: Steps of the run, including the warm-up; required by linear, cosine and wsd.
        decay_steps: Steps of the final decay; required by wsd.
        min_ratio: The factor at the end, a fraction of the full learning rate.

    Raises:
        ValueError: The kind is unknown, or a number is missing, of the wrong type or out of range.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"schedule {self.kind!r} is unknown; known: {', '.join(SCHEDULES)}")
        for name in ("warmup_steps", "total_steps", "decay_steps"):
            value = getattr(self, name)
            if value is None and name in SCHEDULES[self.kind]:
                raise ValueError(f"schedule {self.kind!r} needs {name}=...")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
        ratio = self.min_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ValueError(f"min_ratio={ratio!r} must be a number in [0, 1]")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps={self.total_steps} must be more than warmup_steps={self.warmup_steps}")
        if self.decay_steps is not None and not 0 < self.decay_steps <= (self.total_steps or 0) - self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} must be above 0 and fit after warmup_steps={self.warmup_steps} into "
                f"total_steps={self.total_steps}"
            )

    def factor(self, step: int) -> float:
        """Return the factor of the step that follows `step` completed steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse-sqrt":
            return max(self.min_ratio, math.sqrt(max(self.warmup_steps, 1) / (step + 1)))
        assert self.total_steps is not None
        start = self.total_steps - self.decay_steps if self.kind == "wsd" and self.decay_steps else self.warmup_steps
        progress = min(max(step - start, 0) / (self.total_steps - start), 1.0)
        height = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * height


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to matrices and stacks of matrices.

    Vectors (norm weights, biases, attention sinks, decays of linear attention) have none, nor have the biases of
    experts, which are stacked `[E, N]` under a name that ends in "bias", and short convolutions `[C, 1, W]`.
    """
    return parameter.dim() > 1 and not name.endswith(("bias", "conv1d.weight", "A_log"))
