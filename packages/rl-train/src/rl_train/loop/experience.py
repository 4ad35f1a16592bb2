"""`Experience`: prompts and their episodes with scores; `StepRollouts`: all of those that a step drew."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from rl_models import Batch
from rl_train.data.prompts import Prompt
from rl_train.loop.scoring import Scored
from rl_train.trajectories.episodes import episode_ids
from rl_train.trajectories.rollout_files import ESTIMATES


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


@dataclass(frozen=True)
class StepRollouts:
    """The responses of a step.

    Attributes:
        experience: The responses that the step learns from.
        drawn: All prompts and responses that the step drew.
        kept: Whether the step learns from the responses to a prompt that it drew, `[prompts]`.
    """

    experience: Experience
    drawn: Experience
    kept: Tensor

    @property
    def learned(self) -> Tensor:
        """Say for each sequence whether the step learns from it, `[N]`."""
        batch = self.drawn.batch
        return self.kept[episode_ids(batch) // self.drawn.scores.shape[1]] & (batch.masked_counts > 0)

    def with_estimates(self, learned: Batch | None) -> Experience:
        """Return the responses with the fields `ESTIMATES` of the batch that the step learns from; NaN elsewhere."""
        batch, fields = self.drawn.batch, dict[str, Tensor]()
        for name in ESTIMATES if learned is not None else ():
            if name in learned.fields:  # type: ignore[union-attr]
                fields[name] = torch.full((batch.num_tokens,), torch.nan)
                fields[name][self.learned[batch.sequence_ids]] = learned[name].float()  # type: ignore[index]
        return Experience(self.drawn.prompts, batch.with_fields(**fields), self.drawn.scores, self.drawn.scored)
