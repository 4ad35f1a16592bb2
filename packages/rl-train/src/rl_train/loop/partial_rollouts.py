"""`PartialRollouts`: a step ends when enough responses are complete; the others go on in later steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_layers.module import hashed_seed
from parallel_models.generation import end_sessions
from rl_models import Batch
from rl_train.data.images import load_images
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION, RolloutEngine
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.draws import Ask, Draw, Drawn, DrawsInFlight, State, done
from rl_train.trajectories.samples import Sample, batch_of, next_call, parts_of


class PartialRollouts(DrawsInFlight):
    """Draw the responses to every prompt part by part; a step takes the oldest prompts whose responses are complete.

    A part is a call of the engine, which draws at most `rollouts.partial` tokens of each response. Steps ask for
    prompts, and wait for those that would become too old, as those of `DrawsInFlight` do. Responses that are not
    complete keep their tokens, log-probs, masks and versions, and go on in the next step with its weights (Kimi k1.5,
    arXiv:2501.12599; APRIL, arXiv:2509.18521). A training checkpoint has them, so that a resumed run goes on with them.
    """

    def __init__(
        self, checked_run: CheckedRun, rollouts: RolloutEngine, ask: Ask, once: Callable[[Callable[[], Any]], Any]
    ) -> None:
        # All ranks know which responses are complete, and call the engine together.
        super().__init__(checked_run, rollouts, ask, lambda make: make())
        self._calls = 0

    @property
    def state(self) -> State:
        """Return the state after a step, with responses that are not complete."""
        draws = (replace(draw, responses=done(batch_of(_group(draw).samples))) for draw in self._ahead)
        return State(self.position, (*draws, *self._later), self._order)

    def resume(self, state: Mapping[str, Any], training: Path, step: int) -> None:
        """Go on from the state after a step, with the responses as they were then."""
        super().resume(state, training, step)
        saved, self._ahead = self._ahead, deque()
        for draw in saved:
            if not isinstance(draw.responses, _Group):
                draw = replace(draw, responses=self._begin(draw.prompts[0], draw.responses.result()))
            self._ahead.append(draw)

    def take(self, step: int) -> Drawn:
        """Draw parts until the responses of a step are complete, and return these."""
        self._calls = 0
        end_sessions()  # what is cached depends on this step alone, also in a run that is resumed
        return super().take(step)

    def _ask(self, position: int, prompts: list[Prompt]) -> Draw:
        (prompt,) = prompts
        return Draw(position, prompts, self.rollouts.version, self._begin(prompt))

    def _begin(self, prompt: Prompt, drawn: Batch | None = None) -> _Group:
        """Return the responses to a prompt, as far as they are drawn."""
        options = self.checked_run.options
        (images,) = load_images([prompt.chat]) or (None,)
        limit = len(prompt.tokens) + options.sampling.max_new_tokens
        group = _Group([Sample(prompt, images, limit, prompt.tokens) for _ in range(options.samples)])
        if drawn is not None and drawn.mask.any():
            _take(group.samples, drawn)
            self._end(group)
        return group

    def _go_on(self) -> None:
        """Draw the next part of all responses that are not complete."""
        options, groups = self.checked_run.options, [_group(draw) for draw in self._ahead]
        samples = [sample for group in groups for sample in group.samples if not self._is_complete(sample)]
        seed = hashed_seed(options.seed, self._step, self._calls, size=7)
        sampling = replace(options.sampling, stop_ids=self.checked_run.stop_ids)
        batch = self.rollouts.generate(*next_call(samples, sampling, seed, options.rollouts.partial))
        if VERSION not in batch.fields:
            batch = batch.with_fields(**{VERSION: torch.full_like(batch.tokens, self.rollouts.version)})
        _take(samples, batch)
        self._calls += 1
        for group in groups:
            self._end(group)

    def _end(self, group: _Group) -> None:
        if not group.done() and all(map(self._is_complete, group.samples)):
            group.set_result(batch_of(group.samples))

    def _is_complete(self, sample: Sample) -> bool:
        """Say whether a response has its last token: the engine has not filled its last part."""
        if not sample.parts:
            return False
        (begin, end, _), part = sample.parts[-1], self.checked_run.options.rollouts.partial
        fills = end > begin and (end - len(sample.prompt.tokens)) % part == 0
        return not fills or sample.room < 1 or sample.tokens[-1] in self.checked_run.stop_ids

    def _version(self, draw: Draw) -> int:
        versions = [fields[VERSION] for sample in _group(draw).samples for _, _, fields in sample.parts[:1]]
        return min((int(part[0]) for part in versions if isinstance(part, Tensor)), default=self._step - 1)


class _Group(Future[Batch]):
    """The responses to a prompt; the future is done when all are complete."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__()
        self.samples = samples


def _take(samples: Sequence[Sample], batch: Batch) -> None:
    """Add to each sample what an engine has drawn for it, a sequence of the batch."""
    for sample, part in zip(samples, parts_of(batch, [len(sample.tokens) for sample in samples]), strict=True):
        sample.take(part)


def _group(draw: Draw) -> _Group:
    assert isinstance(draw.responses, _Group)
    return draw.responses
