"""`Recipe`: what a loop learns from, with which models, and what it hands over after a step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from rl_models import Batch
from rl_models.api import ModelCalls
from rl_train.options.run_options import RunOptions
from rl_train.report.phase_table import PHASE

Tell = Callable[[Mapping[str, Any]], None]

# The folder of the checkpoint with the best evaluation, in the folder of a run.
BEST = "best"
# A file that a user puts there: the run saves after the step under way, and ends.
STOP = "stop"


class NothingToLearnError(ValueError):
    """A step found nothing to learn from; the loop saves the steps before and ends."""


@dataclass
class Recipe(ABC):
    """The parts of a step that differ between reinforcement learning and learning from files.

    A `Loop` calls `collect`, learns by `update` from each of the `mini_batches`, and calls `hand_over`. Without Ray
    every rank has a recipe and takes the same steps.

    Attributes:
        once: Calls a function on one rank and returns its value, which is pickled, on all.
        tell: Called with the metrics of every step and with messages.
        writes: Whether this process writes the files of the run.
        seconds: The seconds of each phase of the current step, as metrics.
    """

    once: Callable[[Callable[[], Any]], Any]
    tell: Tell
    writes: bool
    seconds: dict[str, float] = field(default_factory=dict, init=False)
    _best: float | None = field(default=None, init=False)

    @property
    @abstractmethod
    def trained(self) -> Mapping[str, ModelCalls]:
        """Return the models that learn, by the name of their folder."""

    @property
    def evaluation_interval(self) -> int:
        """Return the number of steps between evaluations; 0: none."""
        return 0

    @abstractmethod
    def collect(self, step: int) -> tuple[Batch | None, dict[str, float]]:
        """Return the batch of a step, and its metrics, with `tokens`; None if the step learns nothing.

        Raises:
            NothingToLearnError: The run cannot go on.
        """

    def mini_batches(self, batch: Batch, step: int) -> Iterable[Batch]:
        """Yield a batch for each optimizer step."""
        return (batch,)

    @abstractmethod
    def update(self, mini_batch: Batch) -> dict[str, float]:
        """Take one optimizer step of each model that learns, and return its metrics."""

    @abstractmethod
    def hand_over(self, step: int) -> None:
        """End a step: give the new weights to the engine, and remember the place of the run for `state`."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the evaluation after a step; 0: before the first one."""
        return {}

    @property
    def drawn_lengths(self) -> Sequence[int]:
        """Return the lengths of the sequences that engines on the run's devices drew for the last step."""
        return ()

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Return the samples of the last step, for `samples.jsonl`."""
        return ()

    def shown(self, step: int) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """Return the samples of the last step for loggers, and the entries of the event that tells of the step."""
        return (), {}

    @abstractmethod
    def state(self, training: Path, step: int) -> dict[str, Any]:
        """Return the place of the run after a step as JSON values, for its training checkpoint; files go beside it."""

    @abstractmethod
    def resume(self, state: Mapping[str, Any], training: Path, step: int) -> None:
        """Go on from the `state` after a step; the models have its weights."""

    def _keep_best(self, step: int, name: str, value: float, options: RunOptions, *, sign: int = 1) -> None:
        """Save the model after a step where its evaluation is the best so far; with `sign` -1 the lowest is the best.

        At step 0 the best model is the given one, which is not saved.
        """
        if not options.keeps_best or (self._best is not None and sign * value <= sign * self._best):
            return
        self._best = value
        if step:
            (model, *_) = self.trained.values()
            model.wait_for_save()
            model.save_pretrained(options.out / BEST)
            self.say(f"step {step}: the best evaluation {name} so far, {value:.3f}; saved in {BEST}")

    def say(self, message: str) -> None:
        """Tell a message."""
        self.tell({"message": message})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell of the phase, and add the time inside to `seconds_<name>` of the step."""
        self.tell({"phase": name})
        began = time.monotonic()
        with record_function(f"{PHASE}{name}"):
            yield
        key = f"seconds_{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.monotonic() - began
