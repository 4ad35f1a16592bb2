"""The rewards of a run: find them by name, call them at the same time, and add them up with their weights."""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from parallel_models.engine import Progress, checkpoint_folder, unwatched
from rl_train.agents.pool import Agents
from rl_train.environments.pool import Environments
from rl_train.options.functions import find_in_working_folder
from rl_train.options.options import TrainOptions
from rl_train.rewards.judge import JUDGEMENTS, Judge, Judgements, ServerJudge
from rl_train.rewards.pool import RewardPool
from rl_train.rewards.ready import READY
from rl_train.rewards.rubric import REFERENCE, Rubric
from rl_train.rewards.run_judge import RunJudge
from rl_train.rewards.worker import Item, Outcome, checked

_JUDGE = "judge:"
_FORM = re.compile(r"(?:(?P<name>[\w-]+)=)?(?P<function>[\w-]+|judge:[^@]+|[\w.]+:\w+)(?:@(?P<weight>.+))?")


@dataclass(frozen=True)
class NamedReward:
    """One reward of `--reward`: its name in the metrics, its module and function, and its weight in the sum.

    `check` raises ValueError for a row that a ready reward cannot read; None for a custom reward. A judge has the file
    of its `rubric` in place of module and function.
    """

    name: str
    module: str
    function: str
    weight: float
    check: Callable[[Mapping[str, Any]], Any] | None = field(default=None, compare=False)
    rubric: Path | None = None


def parse_rewards(text: str) -> list[NamedReward]:
    """Parse rewards with commas, each `[name=]reward[@weight]`; see `--reward`.

    Raises:
        ValueError: A reward is neither ready nor `module:function`, a weight is no number, or two have one name.
    """
    rewards: dict[str, NamedReward] = {}
    for entry in text.split(","):
        match = _FORM.fullmatch(entry.strip())
        is_known = match is not None and (match["function"] in READY or ":" in match["function"])
        if match is None or not is_known:
            raise ValueError(
                f"reward {entry!r} must be {', '.join(READY)}, module:function, such as rewards:length, or judge:FILE; "
                "a name= before it and an @weight after it are optional"
            )
        function = match["function"]
        try:
            weight = float(match["weight"] or 1)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise ValueError(f"reward {entry!r}: the weight {match['weight']!r} must be a finite number")
        rubric = Path(function.removeprefix(_JUDGE)) if function.startswith(_JUDGE) else None
        name = match["name"] or (function.rpartition(":")[2] if rubric is None else rubric.stem)
        if name in rewards:
            raise ValueError(f"reward {entry!r}: {name} is the name of another reward, too; write NAME={function}")
        ready = READY.get(function)
        module, _, attribute = (ready.function if ready else function).partition(":")
        if rubric is not None:
            module = attribute = ""
        rewards[name] = NamedReward(name, module, attribute, weight, ready.check if ready else None, rubric)
    return list(rewards.values())


def judges_of_run(text: str) -> dict[str, Rubric]:
    """Return the rubrics of models of the run, by the name of the reward."""
    rubrics = {reward.name: Rubric.read(reward.rubric) for reward in parse_rewards(text) if reward.rubric is not None}
    return {name: rubric for name, rubric in rubrics.items() if rubric.url is None}


def folders_of_judges(text: str) -> list[Path]:
    """Return the checkpoint folders of models that the run loads as judges alone."""
    names = {rubric.model for rubric in judges_of_run(text).values() if rubric.model != REFERENCE}
    return [Path(checkpoint_folder(name)) for name in sorted(names)]


def check_rewards(text: str) -> None:
    """Raise ValueError unless `parse_rewards` reads the text, and each module and rubric exists."""
    find_in_working_folder()
    for reward in parse_rewards(text):
        if reward.rubric is not None:
            Rubric.read(reward.rubric)
            continue
        try:
            if importlib.util.find_spec(reward.module) is None:
                raise ModuleNotFoundError(f"No module named {reward.module!r}")
        except (Exception, SystemExit) as error:  # the packages around the module may raise anything
            error_text = f"{type(error).__name__}: {error}"
            raise ValueError(f"reward {reward.name}: importing {reward.module} raised {error_text}") from error


def check_rows(text: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ValueError for the first row that a reward cannot read; `rows` pairs each row with its place."""
    checks = [
        (reward.name, check)
        for reward in parse_rewards(text)
        if (check := reward.check if reward.rubric is None else Rubric.read(reward.rubric).check) is not None
    ]
    for where, row in rows if checks else ():
        for name, check in checks:
            try:
                check(row)
            except ValueError as error:
                raise ValueError(f"{where}: the reward {name}: {error}") from None


class Scores(NamedTuple):
    """The scores of responses, with JSON values.

    Attributes:
        total: The weighted sum of the rewards of each response.
        each: The rewards of each response by name, without weights.
        errors: The number of rewards that failed and count as 0.
        error: The first error; None without errors.
        answers: The answer in each response, of the first reward that returns answers; else None.
        costs: What judges have cost, by the names of metrics; empty without judges.
    """

    total: list[float]
    each: dict[str, list[float]]
    errors: int = 0
    error: str | None = None
    answers: Sequence[str | None] = ()
    costs: dict[str, float] = {}  # noqa: RUF012  # never changed


class Rewards:
    """The rewards of a run, its environments and its agents, each in separate processes. Close them at the end.

    Attributes:
        environments: The environments of several turns; None without.
        agents: The agents; None without.
        progress: Called with the number of answered "calls"; each call scores some of the responses.

    Raises:
        ValueError: A module cannot be imported, or has no such function.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._rewards = parse_rewards(options.reward)
        self._stops = options.rewards.errors == "stop"
        self._pools: dict[str, RewardPool | Judge] = {}
        judgements: Judgements | None = None
        self.environments: Environments | None = None
        self.agents: Agents | None = None
        self.progress: Progress = unwatched
        self._begun = dict[Future[dict[int, Outcome]], str]()
        with ExitStack() as stack:
            if options.converses:
                self.environments = stack.enter_context(closing(Environments(options)))
            if options.runs_agents:
                self.agents = stack.enter_context(closing(Agents(options)))
            for reward in self._rewards:
                if reward.rubric is not None:
                    judgements = judgements or Judgements(options.out / JUDGEMENTS)
                    judge = _judge(reward.rubric, judgements, options)
                    self._pools[reward.name] = stack.enter_context(closing(judge))
                    continue
                try:
                    pool = RewardPool(
                        reward.module,
                        reward.function,
                        workers=options.rewards.workers,
                        limit=options.rewards.timeout,
                        start_limit=options.collective_timeout,
                        stops=self._stops,
                    )
                except ValueError as error:
                    raise ValueError(f"reward {reward.name}: {error}") from None
                self._pools[reward.name] = stack.enter_context(closing(pool))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def at_end(self, end: Callable[[], Any]) -> None:
        """Have `close` call a function first."""
        self._stack.callback(end)

    def begin(self, items: Sequence[Item]) -> dict[str, list[list[int]]]:
        """Start to score items; return the prompts for each model of the run, whose replies `answer` takes.

        Args:
            items: A prompt, a response and the row of the prompt each.
        """
        self._begun = {call: name for name, pool in self._pools.items() for call in pool.begin(items)}
        return {name: judge.questions for name, judge in self._pools.items() if isinstance(judge, RunJudge)}

    def answer(self, name: str, replies: Sequence[Sequence[int]], seconds: float) -> None:
        """Give the replies of a model of the run; see `RunJudge.answer`."""
        judge = self._pools[name]
        assert isinstance(judge, RunJudge)
        judge.answer(replies, seconds)

    def score(self, items: Sequence[Item], places: Sequence[str]) -> Scores:
        """Return the scores of the items, from the calls of `begin` if it was called.

        Args:
            items: See `begin`.
            places: The file and the line of each prompt, for errors.

        Raises:
            ValueError: A reward failed and `--rewards.errors` is stop; or a sum is not finite in fp32.
        """
        each = {reward.name: [0.0] * len(items) for reward in self._rewards}
        answers: dict[str, list[str | None]] = {reward.name: [None] * len(items) for reward in self._rewards}
        errors: list[tuple[int, str]] = []
        if not self._begun:
            self.begin(items)
        calls, self._begun = self._begun, {}
        for done, call in enumerate(as_completed(calls), start=1):
            self.progress("calls", done, len(calls))
            name = calls[call]
            for place, outcome in call.result().items():
                each[name][place], answers[name][place] = outcome.reward, outcome.answer
                if outcome.error is not None:
                    errors.append((place, f"{places[place]}: the reward {name} {outcome.error}"))
            if errors and self._stops:
                for pending in calls:
                    pending.cancel()
                raise ValueError(min(errors)[1])
        weights = {reward.name: reward.weight for reward in self._rewards}
        total = [sum(weights[name] * values[place] for name, values in each.items()) for place in range(len(items))]
        for place, number in enumerate(total):
            if (problem := checked(number).error) is not None:
                raise ValueError(f"{places[place]}: the sum of the rewards {problem.removeprefix('returned ')}")
        first = next((values for values in answers.values() if any(answer is not None for answer in values)), ())
        costs = Counter[str]()
        for judge in self._pools.values():
            if isinstance(judge, Judge):
                costs.update(judge.costs())
        return Scores(total, each, len(errors), min(errors)[1] if errors else None, first, dict(costs))


def _judge(file: Path, judgements: Judgements, options: TrainOptions) -> Judge:
    """Return the judge of a rubric, at its server or of the run."""
    rubric = Rubric.read(file)
    if rubric.url is None:
        return RunJudge(rubric, judgements, options)
    return ServerJudge(rubric, judgements, limit=options.rewards.timeout)
