"""Learning-rate schedules, as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# Forms of the final decay of "wsd": functions of the progress from 0 to 1 that fall from 1 to 0 (Hägele et al. 2024,
# arXiv:2405.18392).
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda y: 1 - y,
    "cosine": lambda y: (1 + math.cos(math.pi * y)) / 2,
    "exponential": lambda y: 2 * 0.5**y - 1,
    "minus-sqrt": lambda y: 1 - math.sqrt(y),
}


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate at each step.

    Steps count from 0. With w = warmup_steps, N = total_steps, m = min_ratio and x = (step - w) / (N - w):

        warm-up         s + (1 - s) (step + 1) / w for step < w, where s = start_ratio; then
        constant        1
        linear          m + (1 - m) (1 - x)
        cosine          m + (1 - m) (1 + cos(pi x)) / 2    (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)
        wsd             1, and over the last `decay_steps`, with y from 0 to 1, m + (1 - m) DECAYS[decay](y): warm-up,
                        stable, decay (Hu et al. 2024, arXiv:2404.06395, section 4.2)
        inverse-sqrt    max(m, sqrt(max(w, 1) / (step + 1)))    (Vaswani et al. 2017, arXiv:1706.03762, eq. 3)

    The factor is constant after `total_steps`.

    Attributes:
        kind: One of `SCHEDULES`.
        warmup_steps: Steps of the warm-up; 0: no warm-up.
        total_steps: Steps of the run, including the warm-up; required by linear, cosine and wsd.
        decay_steps: Steps of the final decay; required by wsd.
        min_ratio: The factor at the end.
        start_ratio: The factor at the start of the warm-up.
        decay: The form of the final decay of wsd, one of `DECAYS`.

    Raises:
        ValueError: A kind or form is unknown, or a number is missing, of the wrong type or out of range.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_steps: int | None = None
    min_ratio: float = 0.0
    start_ratio: float = 0.0
    decay: str = "linear"

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"schedule {self.kind!r} is unknown; known: {', '.join(SCHEDULES)}")
        if self.decay not in DECAYS:
            raise ValueError(f"decay={self.decay!r} is unknown; known: {', '.join(DECAYS)}")
        for name in {"linear": ("total_steps",), "cosine": ("total_steps",), "wsd": ("total_steps", "decay_steps")}.get(
            self.kind, ()
        ):
            if getattr(self, name) is None:
                raise ValueError(f"schedule {self.kind!r} needs {name}=...")
        for name in ("warmup_steps", "total_steps", "decay_steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
        for name in ("min_ratio", "start_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} must be a number in [0, 1]")
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
        """Return the factor of the step that follows `step` completed ones."""
        if step < self.warmup_steps:
            return self.start_ratio + (1 - self.start_ratio) * (step + 1) / self.warmup_steps
        return SCHEDULES[self.kind](self, step)

    def _decayed(self, form: str, step: int, first: int) -> float:
        """Return the decay from 1 at step `first` to `min_ratio` at `total_steps`."""
        assert self.total_steps is not None
        progress = min(max(step - first, 0) / (self.total_steps - first), 1.0)
        return self.min_ratio + (1 - self.min_ratio) * DECAYS[form](progress)

    def _inverse_sqrt(self, step: int) -> float:
        return max(self.min_ratio, math.sqrt(max(self.warmup_steps, 1) / (step + 1)))


SCHEDULES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda schedule, step: 1.0,
    "linear": lambda schedule, step: schedule._decayed("linear", step, schedule.warmup_steps),
    "cosine": lambda schedule, step: schedule._decayed("cosine", step, schedule.warmup_steps),
    "wsd": lambda schedule, step: schedule._decayed(
        schedule.decay, step, (schedule.total_steps or 0) - (schedule.decay_steps or 0)
    ),
    "inverse-sqrt": Schedule._inverse_sqrt,
}
