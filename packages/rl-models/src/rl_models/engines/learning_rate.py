"""Learning-rate schedules, as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl_models.numbers import require_number


@dataclass(frozen=True)
class Schedule:
    """What the learning rate is multiplied with at each step.

        warm-up         (step + 1) / warmup_steps, up to 1; then, with t = step - warmup_steps of n = total_steps -
                        warmup_steps and m = min_ratio,
        constant        1
        linear          1 - (1 - m) t / n
        cosine          m + (1 - m) (1 + cos(pi t / n)) / 2    (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)
        wsd             1, and over the last `decay_steps` linear down to m: warm-up, stable, decay (Hu et al. 2024,
                        arXiv:2404.06395, section 4.2)
        inverse-sqrt    sqrt(w / (step + 1)), w = max(warmup_steps, 1)    (Vaswani et al. 2017, arXiv:1706.03762, eq. 3)

    Steps count from 0; after `total_steps` the last value stays.

    Attributes:
        kind: one of `SCHEDULES`.
        warmup_steps: 0: none.
        total_steps: of the run, warm-up included; linear, cosine and wsd need it.
        decay_steps: wsd's.
        min_ratio: the factor at the end of linear, cosine and wsd.

    Raises:
        ValueError: an unknown kind, a number that it needs is missing, or a number is out of its range.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"schedule {self.kind!r} is unknown; known: {', '.join(SCHEDULES)}")
        require_number("min_ratio", self.min_ratio)
        for name in ("warmup_steps", "total_steps", "decay_steps"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), integer=True)
        needed = {"linear": ("total_steps",), "cosine": ("total_steps",), "wsd": ("total_steps", "decay_steps")}
        for name in needed.get(self.kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"schedule {self.kind!r} needs {name}=...")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative")
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(f"min_ratio={self.min_ratio} must lie in [0, 1]")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps={self.total_steps} must be more than warmup_steps={self.warmup_steps}")
        if self.decay_steps is not None and not 0 < self.decay_steps <= (self.total_steps or 0) - self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} must be above 0 and fit after warmup_steps={self.warmup_steps} into "
                f"total_steps={self.total_steps}"
            )

    def factor(self, step: int) -> float:
        """The factor of the step that follows `step` completed ones."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return SCHEDULES[self.kind](self, step)

    def _decayed(self, shape: float) -> float:
        return self.min_ratio + (1 - self.min_ratio) * shape

    def _progress(self, step: int, first: int) -> float:
        """From 0 at step `first` to 1 at `total_steps`, and 1 after."""
        assert self.total_steps is not None
        return min(max(step - first, 0) / (self.total_steps - first), 1.0)

    def _linear(self, step: int) -> float:
        return self._decayed(1 - self._progress(step, self.warmup_steps))

    def _cosine(self, step: int) -> float:
        return self._decayed((1 + math.cos(math.pi * self._progress(step, self.warmup_steps))) / 2)

    def _wsd(self, step: int) -> float:
        assert self.total_steps is not None
        assert self.decay_steps is not None
        return self._decayed(1 - self._progress(step, self.total_steps - self.decay_steps))

    def _inverse_sqrt(self, step: int) -> float:
        return math.sqrt(max(self.warmup_steps, 1) / (step + 1))


SCHEDULES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda schedule, step: 1.0,
    "linear": Schedule._linear,
    "cosine": Schedule._cosine,
    "wsd": Schedule._wsd,
    "inverse-sqrt": Schedule._inverse_sqrt,
}
