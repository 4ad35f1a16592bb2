"""`Draws`: the responses of a run in the order of its prompts, on request drawn some steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallel_layers.module import python_random
from rl_models import Batch
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION, RolloutEngine
from rl_train.loop.batches import read_batches, write_batches
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.conversations import Ask


@dataclass(frozen=True)
class Draw:
    """Responses to `prompts` that an engine draws or has drawn with the weights of `version`.

    `position` is the place of the first prompt in the order of the run.
    """

    position: int
    prompts: list[Prompt]
    version: int
    responses: Future[Batch]


class Drawn(NamedTuple):
    """Prompts and the responses to them, with the field `version`."""

    prompts: list[Prompt]
    batch: Batch


@dataclass(frozen=True)
class State:
    """The place of a run in the order of its prompts.

    `position` is the place of the next prompt to draw responses to. `ahead` are the responses that no step has taken.
    """

    position: int
    ahead: tuple[Draw, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the places as JSON values, for a training checkpoint; `save` writes the responses."""
        return {"position": self.position, "ahead": [[draw.position, draw.version] for draw in self.ahead]}

    def save(self, training: Path, step: int, kept: Collection[int]) -> None:
        """Write the responses ahead beside the training checkpoint of a step; remove files of steps not in `kept`."""
        folder = training / "ahead"
        for file in folder.glob("*.safetensors"):
            if int(file.stem) not in kept:
                file.unlink()
        # The step that takes the responses raises the engine's error, also after a kill.
        drawn = [draw for draw in self.ahead if draw.responses.exception() is None]
        if drawn:
            folder.mkdir(parents=True, exist_ok=True)
            write_batches(_file(training, step), {str(draw.position): draw.responses.result() for draw in drawn})


class Draws:
    """Ask an engine for the responses of each step, up to `staleness` steps ahead of learning.

        A step takes the oldest responses, then asks for the responses of the step `staleness` later with the weights of
    this moment. An engine on separate devices draws them while the models learn (Noukhovitch et al. 2024,
    arXiv:2410.18252; bounded staleness as in AReaL, arXiv:2505.24298).

        `position` is the place of the next prompt to draw responses to.
    """

    def __init__(self, checked_run: CheckedRun, rollouts: RolloutEngine, ask: Ask) -> None:
        self.checked_run, self.rollouts, self.position = checked_run, rollouts, 0
        self._asks, self._of_step = ask, checked_run.options.prompts_per_step
        self._ahead: deque[Draw] = deque()

    @property
    def state(self) -> State:
        """Return the state after a step."""
        return State(self.position, tuple(self._ahead))

    def resume(self, state: Mapping[str, Any], training: Path, step: int) -> None:
        """Go on from the state (of `State.to_json`) after a step; responses that were not saved are drawn again."""
        self.position = int(state["position"])
        file = _file(training, step)
        saved = read_batches(file) if file.is_file() else {}
        self._ahead.clear()
        for position, version in state.get("ahead", [])[: max(0, self.checked_run.options.steps - step)]:
            if str(position) in saved:
                prompts = self._prompts(position, self._of_step)
                self._ahead.append(Draw(position, prompts, version, _done(saved[str(position)])))
            else:
                self._ahead.append(self._ask(position, self._of_step))

    def take(self, step: int) -> Drawn:
        """Return the responses of a step, or raise the engine's error; ask for the responses of later steps."""
        draw = self._ahead.popleft() if self._ahead else self._next(self._of_step)
        drawn = _drawn(draw)
        options = self.checked_run.options
        while len(self._ahead) < min(options.rollouts.staleness, options.steps - step):
            self._ahead.append(self._next(self._of_step))
        return drawn

    def more(self, count: int) -> Drawn:
        """Return responses to `count` further prompts, drawn with the weights of this moment."""
        return _drawn(self._next(count))

    def wait(self, version: int) -> None:
        """Wait until the engine is idle, so that one version of the weights draws all responses of a draw.

        An engine that has lost its weights draws responses again; they come from `version`, the actor's weights.
        """
        for number, draw in enumerate(self._ahead):
            if draw.responses.done():
                continue
            # A future may draw in its first `result`. The step that takes the responses raises its error.
            with suppress(Exception):
                batch = draw.responses.result()
                if getattr(draw.responses, "drawn_anew", False):
                    batch = batch.with_fields(**{VERSION: torch.where(batch.mask, version, -1)})
                    self._ahead[number] = replace(draw, version=version, responses=_done(batch))

    def _next(self, count: int) -> Draw:
        draw = self._ask(self.position, count)
        self.position += count
        return draw

    def _ask(self, position: int, count: int) -> Draw:
        options = self.checked_run.options
        prompts = self._prompts(position, count)
        sampling = replace(
            options.sampling,
            n=options.samples,
            stop_ids=self.checked_run.stop_ids,
            # Each batch of a run has a different seed.
            seed=options.seed * 1_000_003 + position + count,
        )
        responses = self._asks(options.prompts, prompts, sampling)
        return Draw(position, prompts, self.rollouts.version, responses)

    def _prompts(self, position: int, count: int) -> list[Prompt]:
        return [self.checked_run.prompts[index] for index in self._indices(position, count)]

    def _indices(self, position: int, count: int) -> list[int]:
        """Return the indices of prompts; each pass through the file has its own order."""
        total = len(self.checked_run.prompts)
        places = [divmod(place, total) for place in range(position, position + count)]
        return [_order(self.checked_run.options.seed, epoch, total)[place] for epoch, place in places]


def _drawn(draw: Draw) -> Drawn:
    """Wait for the responses of a draw; all come from the draw's version where the engine does not say otherwise."""
    batch = draw.responses.result()
    if VERSION not in batch.fields:
        batch = batch.with_fields(**{VERSION: torch.where(batch.mask, draw.version, -1)})
    return Drawn(draw.prompts, batch)


def _done(batch: Batch) -> Future[Batch]:
    future: Future[Batch] = Future()
    future.set_result(batch)
    return future


def _file(training: Path, step: int) -> Path:
    """Return the file of the responses that a run had drawn ahead after a step."""
    return training / "ahead" / f"{step:08d}.safetensors"


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, total: int) -> list[int]:
    """Return the order of the prompts in one pass through their file."""
    return python_random(seed, epoch).sample(range(total), total)
