"""`Signs`: warnings before a run collapses, from the metrics of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

# A sign is judged by the median of the last RECENT steps, against the median of up to USUAL steps before these.
RECENT, USUAL, FEWEST_USUAL = 3, 20, 5
# The share by which a reward falls that counts as a fall.
FALL_OF_REWARD = 0.2


@dataclass(frozen=True)
class Sign:
    """A metric that has left its usual values.

    Attributes:
        metric: The name of the metric.
        times: The factor of the usual value that the metric passes, below 1 for a fall; None: `limit` alone decides.
        limit: The value that the metric passes, too: values on the other side are harmless.
        meaning: What the sign means, and the options that help.
        with_reward: Whether the reward must have fallen, too.
    """

    metric: str
    times: float | None
    limit: float
    meaning: str
    with_reward: bool = False

    def shows(self, recent: float, usual: float) -> bool:
        """Say whether a recent value differs from the usual one by more than the sign allows."""
        if self.times is None:
            return recent > self.limit
        if self.times < 1:
            return recent < self.times * usual and recent < self.limit
        return recent > self.times * usual and recent > self.limit

    def text(self, recent: float, usual: float) -> str:
        """Return the warning."""
        verb = "is" if self.times is None else "has fallen to" if self.times < 1 else "has risen to"
        return f"{self.metric} {verb} {recent:.3g} (usually {usual:.3g}): {self.meaning}"


_APART = (
    "the engine and the trainer disagree; set --importance-cap 2, lower --staleness, or for a mixture of experts set "
    "--rollouts.routing or --objective.router-replay"
)
_LARGE_UPDATES = "updates are too large; lower --learning-rate or --epochs, or raise --mini-batch"
SIGNS: tuple[Sign, ...] = (
    Sign(
        "entropy",
        0.2,
        0.3,
        "the reward falls, too: the policy has stopped exploring; raise --objective.clip-high or "
        "--objective.entropy-coefficient, or set --kl-coefficient",
        with_reward=True,
    ),
    Sign(
        "entropy",
        2.0,
        1.0,
        "the policy becomes random; lower --learning-rate, or --objective.entropy-coefficient if it is above 0",
    ),
    Sign("rollout_kl", 10.0, 0.01, _APART),
    Sign("rollout_difference_mean", 3.0, 0.05, _APART),
    Sign("rollout_difference", 5.0, 2.3, f"a token's ratio p_train / p_rollout is above 10 or below 0.1: {_APART}"),
    Sign(
        "routing_difference",
        None,
        0.1,
        "the trainer's routers choose other experts than the engine's, which the replay hides; look for another dtype "
        "in the engine, and leave --rollouts.quantization out",
    ),
    Sign(
        "importance_outside",
        3.0,
        0.1,
        "many importance weights are cut; lower --staleness, or find the cause of the difference",
    ),
    Sign("clip_fraction", 3.0, 0.3, _LARGE_UPDATES),
    Sign("approx_kl", 5.0, 0.1, _LARGE_UPDATES),
    Sign("kl", None, 10.0, "the policy has left its reference; raise --kl-coefficient, or lower --learning-rate"),
    Sign(
        "response_length",
        2.0,
        64.0,
        "long responses may earn more; set --rewards.overlong-buffer, or a reward that counts length",
    ),
    Sign(
        "response_length",
        0.5,
        float("inf"),
        "short responses may earn more; look at the samples and the reward, or set --kl-coefficient",
    ),
    Sign("truncated", 2.0, 0.2, "responses are cut off; raise --max-new-tokens, or set --rewards.overlong-buffer"),
    Sign(
        "frac_reward_zero_std",
        None,
        0.95,
        "the responses to almost every prompt have equal rewards, and there is little to learn; set --equal-groups "
        "resample, raise --samples, or choose easier or harder prompts",
    ),
    Sign(
        "grad_norm",
        10.0,
        1.0,
        "a divergence may follow; lower --learning-rate or --optimizer.max-grad-norm",
    ),
)


@dataclass
class Signs:
    """The signs of a run so far. Each warns once, until its metric has recovered.

    Attributes:
        shown: The warnings that hold now, by the number of the sign in `SIGNS`.
    """

    shown: dict[int, str] = field(default_factory=dict)
    _values: dict[str, deque[float]] = field(default_factory=dict)
    _usual: dict[int, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> list[str]:
        """Take the metrics of the next step, and return the warnings that begin with it."""
        for name in {sign.metric for sign in SIGNS} | {"reward"}:
            if name in values:
                self._values.setdefault(name, deque(maxlen=RECENT + USUAL)).append(values[name])
        return [text for number, sign in enumerate(SIGNS) if (text := self._judged(number, sign, values)) is not None]

    def _judged(self, number: int, sign: Sign, values: Mapping[str, float]) -> str | None:
        """Return the warning of a sign that begins to show; a sign that shows keeps its usual value."""
        if sign.metric not in values or (sign.with_reward and "reward" not in values):
            return None
        recent, usual = self._medians(sign.metric)
        if usual is None or number in self.shown:
            usual = self._usual.get(number)
        if recent is None or usual is None or not sign.shows(recent, usual):
            if self.shown.pop(number, None) is not None:
                # The steps of the warning are not usual.
                self._values[sign.metric] = deque(list(self._values[sign.metric])[-RECENT:], maxlen=RECENT + USUAL)
            return None
        if number in self.shown or (sign.with_reward and not self._reward_falls()):
            return None
        self._usual[number] = usual
        self.shown[number] = sign.text(recent, usual)
        return self.shown[number]

    def _medians(self, name: str) -> tuple[float | None, float | None]:
        """Return the recent and the usual value of a metric; None for too few steps."""
        steps = list(self._values[name])
        recent, before = steps[-RECENT:], steps[:-RECENT]
        return (
            median(recent) if len(recent) == RECENT else None,
            median(before) if len(before) >= FEWEST_USUAL else None,
        )

    def _reward_falls(self) -> bool:
        recent, usual = self._medians("reward")
        return recent is not None and usual is not None and recent < usual - FALL_OF_REWARD * abs(usual)


def warned(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the warnings of a run as `step` and `text`, from the lines of `metrics.jsonl`."""
    signs = Signs()
    return [{"step": record["step"], "text": text} for record in records for text in signs.add(record)]
