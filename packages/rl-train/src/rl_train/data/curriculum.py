"""`Curriculum`: leave out prompts whose rewards so far are far from a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallel_layers.module import python_random
from rl_train.data.mixture import Key

# The lowest chance of a prompt when its turn comes: its mean reward stays known while the policy learns.
_LEAST = 0.1


class Curriculum:
    """The chance of each prompt when its turn comes, by the mean reward of the responses to it so far.

    A prompt that has no reward yet is always drawn. The chance of others falls linearly from 1, for a mean at the
    target, to 0.1, for the mean that is furthest from the target. The idea of a target is that of adaptive curricula
    (Shi et al. 2025, arXiv:2504.05520); here the difficulty is what the run itself has seen.

    Attributes:
        means: The mean reward of each prompt. When a prompt is drawn again, its new mean counts as much as all before.
    """

    def __init__(self, target: float, seed: int) -> None:
        self._target, self._seed, self.means = target, seed, dict[Key, float]()

    def observe(self, keys: Sequence[Key], means: Iterable[float]) -> None:
        """Remember the mean rewards of the responses to prompts."""
        for key, mean in zip(keys, means, strict=True):
            self.means[key] = mean if key not in self.means else (self.means[key] + mean) / 2

    def skips(self, key: Key, place: Sequence[int]) -> bool:
        """Say whether a prompt is left out at a place of its source; the same on every rank and after a resume."""
        if key not in self.means:
            return False
        furthest = max(abs(mean - self._target) for mean in (self._lowest, self._highest))
        nearness = 1 - abs(self.means[key] - self._target) / furthest if furthest else 1.0
        return python_random(self._seed, "curriculum", *key, *place).random() >= max(_LEAST, nearness)

    def begin(self) -> None:
        """Look at the means again, before prompts are drawn."""
        self._lowest, self._highest = min(self.means.values(), default=0.0), max(self.means.values(), default=0.0)

    @property
    def state(self) -> list[list[float]]:
        """Return the means as JSON values, for a training checkpoint."""
        return [[*key, mean] for key, mean in self.means.items()]

    def resume(self, state: Iterable[Sequence[float]]) -> None:
        """Go on from a `state`."""
        self.means = {(int(source), int(window), int(row)): mean for source, window, row, mean in state}
