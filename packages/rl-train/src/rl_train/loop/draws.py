"""`Draws`: the responses of a run in the order of its prompts, on request some steps ahead; `asking` draws them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.curriculum import Curriculum
from rl_train.data.images import load_images
from rl_train.data.mixture import Key
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION, RolloutEngine
from rl_train.loop.agent_episodes import AgentEpisodes
from rl_train.loop.batches import read_batches, write_batches
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.environment_turns import EnvironmentTurns
from rl_train.loop.environment_turns_in_flight import EnvironmentTurnsInFlight
from rl_train.rewards.function import Rewards
from rl_train.trajectories.episodes import episode_ids
from rl_train.trajectories.samples import with_images

# (prompts, sampling) -> the responses, `sampling.n` to each prompt.
Ask = Callable[[Sequence[Prompt], SamplingOptions], Future[Batch]]


def asking(
    checked_run: CheckedRun,
    engine: RolloutEngine,
    rewards: Rewards | None,
    once: Callable[[Callable[[], Any]], Any],
    tell: Callable[[str], None],
) -> Ask:
    """Return the function with which a run draws responses.

    It is that of `AgentEpisodes` with agents, and of `EnvironmentTurns` with an environment of several turns.
    """
    if checked_run.options.runs_agents:
        return AgentEpisodes(checked_run, engine, rewards, once, tell).draw
    if checked_run.options.converses:
        kind = EnvironmentTurnsInFlight if checked_run.options.rollouts.in_flight else EnvironmentTurns
        return kind(checked_run, engine, rewards, once, tell).draw

    def ask(prompts: Sequence[Prompt], sampling: SamplingOptions) -> Future[Batch]:
        visual = load_images([prompt.chat for prompt in prompts])
        return engine.generate_async(with_images([prompt.tokens for prompt in prompts], visual), sampling)

    return ask


# Seconds between two looks at which draws are complete.
_LOOK_SECONDS = 0.005


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
    `order` is the place in each source of prompts, and what the curriculum has seen.
    """

    position: int
    ahead: tuple[Draw, ...]
    order: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the places as JSON values, for a training checkpoint; `save` writes the responses."""
        ahead = [[draw.position, draw.version, [prompt.key for prompt in draw.prompts]] for draw in self.ahead]
        return {"position": self.position, "ahead": ahead, **self.order}

    def save(self, training: Path, step: int, kept: Collection[int]) -> None:
        """Write the responses ahead beside the training checkpoint of a step; remove files of steps not in `kept`.

        A run that takes a step again has other responses than before, also where none is complete.
        """
        folder = training / "ahead"
        for file in folder.glob("*.safetensors"):
            if int(file.stem) not in kept or int(file.stem) == step:
                file.unlink()
        # The step that takes the responses raises the engine's error, also after a kill.
        drawn = [draw for draw in self.ahead if draw.responses.done() and draw.responses.exception() is None]
        if drawn:
            folder.mkdir(parents=True, exist_ok=True)
            write_batches(_file(training, step), {str(draw.position): draw.responses.result() for draw in drawn})


class Draws:
    """Ask an engine for the responses of each step, up to `staleness` steps ahead of learning.

    A step takes the oldest responses, then asks for the responses of the step `staleness` later with the weights of
    this moment. An engine on separate devices draws them while the models learn (Noukhovitch et al. 2024,
    arXiv:2410.18252; bounded staleness as in AReaL, arXiv:2505.24298).

    `position` is the place of the next prompt to draw responses to. `once` calls a function on the rank that knows
    which draws are complete, and returns its value on all ranks.
    """

    def __init__(
        self, checked_run: CheckedRun, rollouts: RolloutEngine, ask: Ask, once: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self.checked_run, self.rollouts, self.position = checked_run, rollouts, 0
        self._asks, self._once, self._of_step = ask, once, checked_run.options.prompts_per_step
        self._per_draw = self._of_step
        self._ahead: deque[Draw] = deque()
        self._later: list[Draw] = []  # of steps that a resumed run of fewer `--steps` does not reach
        self._mixture, options = checked_run.mixture(), checked_run.options
        target = options.data.curriculum
        self._curriculum = None if target is None else Curriculum(target, options.seed)

    @property
    def state(self) -> State:
        """Return the state after a step."""
        return State(self.position, (*self._ahead, *self._later), self._order)

    @property
    def _order(self) -> dict[str, Any]:
        """Return the place in each source, and what the curriculum has seen, as JSON values."""
        means = {} if self._curriculum is None else {"rewards_of_prompts": self._curriculum.state}
        return {"order": self._mixture.state, **means}

    def resume(self, state: Mapping[str, Any], training: Path, step: int) -> None:
        """Go on from the state (of `State.to_json`) after a step.

        Responses that were not saved are drawn again. Those of steps behind the last one stay in the state, for a run
        of more steps. With other rows (`--accept-changes`) none are ahead, and the curriculum begins anew.
        """
        self.position = int(state["position"])
        self._mixture.resume(state.get("order", {}), self.position)
        if any(change.startswith("prompts=") for change in self.checked_run.changes):
            state = {}  # what is kept of earlier rows would belong to other rows
        if self._curriculum is not None:
            self._curriculum.resume(state.get("rewards_of_prompts", ()))
        file = _file(training, step)
        saved = read_batches(file) if file.is_file() else {}
        self._ahead.clear()
        self._later.clear()
        needed = max(0, self.checked_run.options.steps - step) * self._of_step // self._per_draw
        for number, (position, version, *of_rows) in enumerate(state.get("ahead", [])):
            keys = of_rows[0] if of_rows else self._keys(position)
            prompts = [replace(self._mixture.get(key), key=tuple(key)) for key in keys]
            draws = self._ahead if number < needed else self._later
            if str(position) in saved:
                draws.append(Draw(position, prompts, version, done(saved[str(position)])))
            else:
                draws.append(
                    self._ask(position, prompts) if number < needed else Draw(position, prompts, version, Future())
                )

    def _keys(self, position: int) -> Sequence[Key]:
        """Return the keys of the rows of a draw, in a run that began before there were several sources."""
        return [key for key, _ in self.checked_run.mixture().take(position + self._per_draw)[position:]]

    def take(self, step: int) -> Drawn:
        """Return the responses of a step, or raise the engine's error; ask for the responses of later steps."""
        draw = self._ahead.popleft() if self._ahead else self._next(self._of_step)
        drawn = self._drawn(draw)
        options = self.checked_run.options
        while len(self._ahead) < min(options.rollouts.staleness, options.steps - step):
            self._ahead.append(self._next(self._of_step))
        return drawn

    def more(self, count: int) -> Drawn:
        """Return responses to `count` further prompts, drawn with the weights of this moment."""
        return self._drawn(self._next(count))

    def observe(self, prompts: Sequence[Prompt], scores: Tensor) -> None:
        """Tell the curriculum the scores `[prompts, n]` of the responses to prompts."""
        if self._curriculum is not None:
            self._curriculum.observe([prompt.key for prompt in prompts], scores.mean(1).tolist())

    def wait(self, version: int) -> None:
        """Wait until the engine is idle, so that one version of the weights draws all responses of a draw.

        An engine that has lost its weights draws responses again; they come from `version`, the actor's weights.
        """
        for number in self._to_wait_for():
            if (draw := self._ahead[number]).responses.done():
                continue
            # A future may draw in its first `result`. The step that takes the responses raises its error.
            with suppress(Exception):
                batch = self._drawn(draw).batch
                if getattr(draw.responses, "drawn_anew", False):
                    batch = batch.with_fields(**{VERSION: torch.where(batch.mask, version, -1)})
                oldest = int(batch[VERSION][batch.mask].min())
                self._ahead[number] = replace(draw, version=oldest, responses=done(batch))

    def _to_wait_for(self) -> Sequence[int]:
        return range(len(self._ahead))

    def _next(self, count: int) -> Draw:
        if self._curriculum is not None:
            self._curriculum.begin()
        rows = self._mixture.take(count, None if self._curriculum is None else self._curriculum.skips)
        draw = self._ask(self.position, [replace(prompt, key=key) for key, prompt in rows])
        self.position += count
        return draw

    def _drawn(self, draw: Draw) -> Drawn:
        """Wait for the responses of a draw; all come from its version where the engine does not say otherwise.

        Raises:
            ValueError: The log-prob of a drawn token is not finite.
        """
        batch = draw.responses.result()
        log_probs = batch.fields.get("log_probs", torch.zeros(()))
        for place in (batch.mask & ~log_probs.isfinite()).nonzero()[:1, 0].tolist():
            raise ValueError(self._broken(draw.prompts, batch, place))
        if VERSION not in batch.fields:
            batch = batch.with_fields(**{VERSION: torch.where(batch.mask, draw.version, -1)})
        return Drawn(draw.prompts, batch)

    def _broken(self, prompts: Sequence[Prompt], batch: Batch, place: int) -> str:
        """Return the error of the drawn token at a place of a batch, whose log-prob is not finite."""
        number, episodes = int(batch.sequence_ids[place]), episode_ids(batch)
        token = int(batch.mask[: place + 1][batch.sequence_ids[: place + 1] == number].sum())
        prompt, response = divmod(int(episodes[number]), (int(episodes[-1]) + 1) // len(prompts))
        return (
            f"{prompts[prompt].place}: rollouts={self.checked_run.options.rollouts.engine} gives token {token} of "
            f"response {response + 1}, the id {int(batch.tokens[place])}, the log-prob {batch['log_probs'][place]:g}, "
            "from which nothing can be learned; check the weights and the dtype of the engine"
        )

    def _ask(self, position: int, prompts: list[Prompt]) -> Draw:
        options = self.checked_run.options
        sampling = replace(
            options.sampling,
            n=options.samples,
            stop_ids=self.checked_run.stop_ids,
            # Each batch of a run has a different seed.
            seed=options.seed * 1_000_003 + position + len(prompts),
        )
        responses = self._asks(prompts, sampling)
        return Draw(position, prompts, self.rollouts.version, responses)


class DrawsInFlight(Draws):
    """Draw every prompt by itself, while the weights change; a step takes the oldest draws that are complete.

    A step first asks for prompts until `staleness` + 1 steps are in flight. It leaves out draws that are not complete,
    as long as a later step can learn from each of them within `staleness` versions of its first token (PipelineRL,
    Piché et al. 2025, arXiv:2509.19128).
    """

    def __init__(
        self, checked_run: CheckedRun, rollouts: RolloutEngine, ask: Ask, once: Callable[[Callable[[], Any]], Any]
    ) -> None:
        super().__init__(checked_run, rollouts, ask, once)
        self._per_draw, self._step = 1, 0

    def take(self, step: int) -> Drawn:
        """Ask for responses as long as there is room; return those of a step, or raise the engine's error."""
        options, self._step = self.checked_run.options, step
        steps = min(options.rollouts.staleness, options.steps - step)
        return self._take(self._of_step, self._of_step * (1 + steps) - len(self._ahead))

    def more(self, count: int) -> Drawn:
        """Ask for responses to `count` further prompts, and return the oldest responses to `count` prompts."""
        return self._take(count, count)

    def _take(self, count: int, further: int) -> Drawn:
        self._ahead.extend(self._next(1) for _ in range(further))
        chosen = set(self._once(lambda: self._choose(count)))
        draws = [draw for number, draw in enumerate(self._ahead) if number in chosen]
        self._ahead = deque(draw for number, draw in enumerate(self._ahead) if number not in chosen)
        prompts, batches = zip(*map(self._drawn, draws), strict=True)
        return Drawn([prompt for of_draw in prompts for prompt in of_draw], Batch.concatenate(batches))

    def _choose(self, count: int) -> list[int]:
        """Wait until `count` draws are complete and the other draws can wait; return the numbers of the oldest."""
        while True:
            complete = self._complete()
            chosen = complete[:count]
            others = [draw for number, draw in enumerate(self._ahead) if number not in chosen]
            ages = [self._step + place // self._of_step - self._version(draw) for place, draw in enumerate(others)]
            can_wait = max(ages, default=0) <= self.checked_run.options.rollouts.staleness
            if len(chosen) == count and (can_wait or len(complete) == len(self._ahead)):
                return chosen
            self._go_on()

    def _go_on(self) -> None:
        """Let the engine draw until the next look."""
        time.sleep(_LOOK_SECONDS)

    def _to_wait_for(self) -> Sequence[int]:
        """Return the draws that are complete: `wait` exchanges them among the ranks, for a training checkpoint."""
        complete: list[int] = self._once(self._complete)
        return complete

    def _complete(self) -> list[int]:
        drawings = [getattr(draw.responses, "drawing", None) for draw in self._ahead]
        return [
            number
            for number, (draw, drawing) in enumerate(zip(self._ahead, drawings, strict=True))
            if draw.responses.done() or (drawing is not None and drawing.done())
        ]

    def _version(self, draw: Draw) -> int:
        """Return the version of a draw's first token; the newest one before this token is drawn."""
        if (drawing := getattr(draw.responses, "drawing", None)) is None:
            return draw.version
        version: int | None = drawing.version()
        return self._step - 1 if version is None else version


def done(batch: Batch) -> Future[Batch]:
    """Return a future that has the responses."""
    future: Future[Batch] = Future()
    future.set_result(batch)
    return future


def _file(training: Path, step: int) -> Path:
    """Return the file of the responses that a run had drawn ahead after a step."""
    return training / "ahead" / f"{step:08d}.safetensors"
