"""`Experience`: the prompts and episodes of a step, with their scores."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

from torch import Tensor

from rl_models import Batch
from rl_train.data.prompts import Prompt
from rl_train.loop.scoring import Scored
from rl_train.trajectories.episodes import episode_ids


@dataclass
class Experience:
    """Prompts, the episodes of each one, in a batch of all their samples, and the scores `[prompts, episodes]`.

    `scored` are the rewards of all drawn episodes. `scores` may be fewer, and include the length penalty.
    """

    prompts: list[Prompt]
    batch: Batch
    scores: Tensor
    scored: Scored

    @property
    def differs(self) -> Tensor:
        """Say for each prompt whether the scores of its responses differ, `[prompts]`."""
        return self.scores.amax(1) > self.scores.amin(1)

    def informative(self) -> Experience:
        """Keep the responses to prompts whose responses differ in score (DAPO, section 3.2)."""
        kept = self.differs.repeat_interleave(self.scores.shape[1])[episode_ids(self.batch)]
        prompts = list(compress(self.prompts, self.differs.tolist()))
        return Experience(prompts, self.batch.select(kept.nonzero().flatten()), self.scores[self.differs], self.scored)
