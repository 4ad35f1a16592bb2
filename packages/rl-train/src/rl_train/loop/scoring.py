"""`Scorer`: have the rewards score a batch of responses, on one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_models.batch import Batch
from rl_train.data.prompts import Prompt, TextCodec
from rl_train.data.sources import place
from rl_train.loop.plan import Plan
from rl_train.rewards import Response
from rl_train.rewards.function import Rewards, Scores


@dataclass(frozen=True)
class Scored:
    """The scores of responses `[N]`, the rewards that they are the sum of by name, and the number of failures.

    `answers` are those that a reward has read from the responses; empty without such a reward.
    """

    scores: Tensor
    rewards: dict[str, Tensor]
    errors: int
    answers: Sequence[str | None] = ()

    def describe(self, *, counts_errors: bool) -> dict[str, float]:
        """Return the mean of each reward, if there are several, and the number of failures where they are counted."""
        several = self.rewards if len(self.rewards) > 1 else {}
        means = {f"reward/{name}": float(found.mean()) for name, found in several.items()}
        return means | ({"reward_errors": float(self.errors)} if counts_errors else {})

    @staticmethod
    def concatenate(parts: Sequence[Scored]) -> Scored:
        """Join the scores of several batches."""
        rewards = {name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards}
        return Scored(torch.cat([part.scores for part in parts]), rewards, sum(part.errors for part in parts))


@dataclass(frozen=True)
class Scorer:
    """Read responses as the rewards do, and score them.

    Attributes:
        plan: The run.
        rewards: The rewards; None on ranks where `once` does not call its function.
        once: Calls a function on one rank and returns its JSON value on all.
        tell: Called with a message about rewards that failed.
    """

    plan: Plan
    rewards: Rewards | None
    once: Callable[[Callable[[], Any]], Any]
    tell: Callable[[str], None]

    @cached_property
    def codec(self) -> TextCodec:
        """Return the tokenizer of the policy."""
        return TextCodec(self.plan.options.model)

    def as_read(self, prompt: Prompt, response: Tensor) -> tuple[Any, Any]:
        """Return a prompt and a response as a reward reads them: text with a tokenizer, else token ids."""
        ids = response.tolist()
        if not self.codec.available:
            return prompt.tokens, ids
        asked = str(prompt.row["text"]) if "text" in prompt.row else self.codec.decode(prompt.tokens)
        reason = "length" if self.truncated(response) else "stop"
        return asked, Response(self.codec.decode(ids), self.codec.decode(ids, special=True), ids, reason)

    def truncated(self, response: Tensor) -> bool:
        """Say whether a response has the longest length and no stop token at its end."""
        longest = self.plan.options.max_new_tokens
        return len(response) == longest and int(response[-1]) not in self.plan.stop_ids

    def __call__(self, file: Path, prompts: Sequence[Prompt], batch: Batch) -> Scored:
        """Score the responses of a batch to the prompts of a file, one prompt for each response."""

        def scores() -> Scores:
            assert self.rewards is not None
            pairs = zip(prompts, batch.responses(), strict=True)
            items = [(*self.as_read(prompt, response), prompt.row) for prompt, response in pairs]
            return self.rewards.score(items, [place(file, prompt.line) for prompt in prompts])

        found = Scores(*self.once(scores))
        if found.error is not None:
            count = "a reward failed and counts" if found.errors == 1 else f"{found.errors} rewards failed and count"
            self.tell(f"{count} as 0; {found.error}")
        rewards = {name: torch.tensor(values, dtype=torch.float32) for name, values in found.each.items()}
        return Scored(torch.tensor(found.total, dtype=torch.float32), rewards, found.errors, found.answers)
