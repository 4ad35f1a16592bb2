"""`Draws`: the responses of a run in the order of its prompts, on request drawn some steps ahead."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl_models.batch import Batch
from rl_train.data.prompts import Prompt
from rl_train.loop.plan import Plan
from rl_train.rollouts import RolloutEngine, SamplingOptions


@dataclass(frozen=True)
class Draw:
    """The responses to `prompts` that an engine was asked for, with the weights of `version`.

    `position` is the place of the first prompt in the order of the run.
    """

    position: int
    prompts: list[Prompt]
    version: int
    responses: Future[Batch]


class Draws:
    """Ask an engine for the responses of each step, up to `staleness` steps ahead of learning.

    A step takes the oldest responses, then asks for those of the step `staleness` later with the weights of this
    moment. An engine on devices of its own draws them while the models learn (Noukhovitch et al. 2024,
    arXiv:2410.18252; bounded staleness as in AReaL, arXiv:2505.24298).

    `position` is the place of the next prompt that the engine is asked for.
    """

    def __init__(self, plan: Plan, rollouts: RolloutEngine) -> None:
        self.plan, self.rollouts, self.position = plan, rollouts, 0
        self._ahead: deque[Draw] = deque()

    @property
    def state(self) -> dict[str, Any]:
        """Return the position, and the positions of the responses that no step has taken."""
        return {"position": self.position, "ahead": [draw.position for draw in self._ahead]}

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from the state after a step; responses ahead are drawn again, with the weights of this moment."""
        self.position = int(state["position"])
        ahead = state.get("ahead", [])[: max(0, self.plan.options.steps - step)]
        self._ahead = deque(self._ask(int(position), self._of_step) for position in ahead)

    def take(self, step: int) -> Draw:
        """Return the responses of a step, drawn, and ask for those of later steps.

        Raises:
            Exception: What the engine raised when it drew these responses.
        """
        draw = self._ahead.popleft() if self._ahead else self._next(self._of_step)
        draw.responses.result()
        options = self.plan.options
        while len(self._ahead) < min(options.staleness, options.steps - step):
            self._ahead.append(self._next(self._of_step))
        return draw

    def more(self, count: int) -> Draw:
        """Return responses to `count` further prompts, drawn with the weights of this moment."""
        draw = self._next(count)
        draw.responses.result()
        return draw

    def wait(self) -> None:
        """Wait until the engine draws nothing: all responses of a draw are of one version of the weights."""
        for draw in self._ahead:
            # A future may draw in its first `result`. Its error is raised in the step that takes the responses.
            with suppress(Exception):
                draw.responses.result()

    @property
    def _of_step(self) -> int:
        return self.plan.options.prompts_per_step

    def _next(self, count: int) -> Draw:
        draw = self._ask(self.position, count)
        self.position += count
        return draw

    def _ask(self, position: int, count: int) -> Draw:
        options = self.plan.options
        prompts = [self.plan.prompts[index] for index in self._indices(position, count)]
        sampling = SamplingOptions(
            options.max_new_tokens,
            n=options.samples,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            keep_sampling_mask=options.keep_sampling_mask,
            stop_ids=self.plan.stop_ids,
            # Each batch of a run has a seed of its own.
            seed=options.seed * 1_000_003 + position + count,
        )
        responses = self.rollouts.generate_async([prompt.tokens for prompt in prompts], sampling)
        return Draw(position, prompts, self.rollouts.version, responses)

    def _indices(self, position: int, count: int) -> list[int]:
        """Return the indices of prompts; each pass through the file has its own order."""
        total = len(self.plan.prompts)
        places = [divmod(place, total) for place in range(position, position + count)]
        return [_order(self.plan.options.seed, epoch, total)[place] for epoch, place in places]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, total: int) -> list[int]:
    """Return the order of the prompts in one pass through their file."""
    return random.Random(f"{seed}/{epoch}").sample(range(total), total)
