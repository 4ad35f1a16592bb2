"""Draw responses with a model and the engine of a run, and score them: `rl-train evaluate` and `generate`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_models import Actor
from rl_train.engines.native import NativeEngine
from rl_train.loop.checked_run import CheckedRun, check_run
from rl_train.loop.draws import asking
from rl_train.loop.evaluation import evaluate
from rl_train.loop.judging import judging_models
from rl_train.loop.recipe import Tell
from rl_train.loop.recipe_run import LocalRank, ModelMaker, on_ranks
from rl_train.loop.run import rewards_of, rollouts_of
from rl_train.loop.scoring import Scored, Scorer
from rl_train.options.draw_options import EvaluateOptions, GenerateOptions
from rl_train.options.options import SOURCES


def draw(options: GenerateOptions, on_event: Tell) -> dict[str, float]:
    """Draw the responses, and return their metrics.

    `on_event` is called with events for a `Display`, and with `{"record": ...}` for each response, in the order of the
    prompts: `line`, `prompt`, `response`, `response_length`, `truncated`, and with rewards `reward`.

    Raises:
        RankFailed: A rank failed.
        ValueError: As for `check_run`.
    """
    evaluates = isinstance(options, EvaluateOptions)
    names = ("reward", "environment", "rewards") if evaluates else ()
    further = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if evaluates and not {"reward", "environment"} & further.keys():
        raise ValueError("evaluate needs a reward; give --reward or --environment, or use rl-train generate")
    if options.prompts is None and not str(further.get("environment", "")).startswith(SOURCES):
        raise ValueError(f"evaluate needs prompts; give --prompts, or an --environment that has them: {SOURCES[0]}TASK")
    if options.samples > 1 and not options.temperature:
        raise ValueError(
            f"--samples {options.samples} responses to a prompt are equal at --temperature 0; give another temperature"
        )
    with tempfile.TemporaryDirectory() as folder:
        run_options = options.train_options(Path(folder) / "run", **further)
        checked_run = check_run(run_options.model_copy(update={"evaluation": type(run_options.evaluation)()}))
        resolved = checked_run.options.model_copy(update={"evaluation": run_options.evaluation})
        checked_run = dataclasses.replace(checked_run, options=resolved, eval_prompts=checked_run.prompts)
        return on_ranks(checked_run, on_event, work=_evaluate if evaluates else _generate)


def _evaluate(rank: LocalRank[CheckedRun]) -> dict[str, float]:
    return _on_rank(rank, scored=True)


def _generate(rank: LocalRank[CheckedRun]) -> dict[str, float]:
    return _on_rank(rank, scored=False)


def _on_rank(rank: LocalRank[CheckedRun], *, scored: bool) -> dict[str, float]:
    checked_run, options = rank.checked_run, rank.checked_run.options
    rewards = rewards_of(rank) if scored else None
    rank.tell({"phase": "loading"})
    make = ModelMaker(options, rank.make)
    actor = make(Actor, options.model, options.grid, 0.0)
    judges = judging_models(options, make, actor, None) if scored else {}
    rank.tell({"phase": "starting the rollouts"})
    engine = rank.stack.enter_context(closing(rollouts_of(checked_run, actor)))

    def say(message: str) -> None:
        rank.tell({"message": message})

    def show(records: Iterator[Mapping[str, Any]]) -> None:
        for record in records if rank.first else ():
            rank.tell({"record": {name: value for name, value in record.items() if scored or name != "reward"}})

    ask = asking(checked_run, engine, rewards, rank.once, say)
    scorer = (Scorer if scored else _Unscored)(checked_run, rewards, rank.once, say, judges)
    rank.tell({"phase": "evaluating" if scored else "generating"})
    return evaluate(checked_run, ask, scorer, show)


class _Unscored(Scorer):
    """Gives every response a score of 0."""

    def __call__(self, prompts: Any, batch: Any) -> Scored:
        """Return zeros."""
        return Scored(torch.zeros(len(prompts)), {}, 0)


def chat(options: GenerateOptions, messages: Iterator[str], write: Callable[[str], None]) -> Iterator[str]:
    """Yield the answer to each message of the user, drawn by the model in this process.

    `write` is called with each piece of an answer as soon as its tokens are drawn.

    Raises:
        ValueError: The model has no chat template, or the grid has several ranks.
    """
    if options.dims or options.rollouts.devices is not None or options.rollouts.engine != "native":
        raise ValueError(
            "a chat runs on one rank with the native engine; leave --dims and --rollouts out, or give --prompts"
        )
    with tempfile.TemporaryDirectory() as folder:
        first = [{"messages": [{"role": "user", "content": "."}]}]
        run_options = options.train_options(Path(folder) / "run", prompts=Path("chat"))
        checked_run = check_run(run_options.model_copy(update={"evaluation": type(run_options.evaluation)()}), first)
    resolved, codec = checked_run.options, checked_run.codec
    make = partial(Actor.from_pretrained, device=options.device)
    actor = ModelMaker(resolved, lambda kind, path, arguments: make(path, **arguments))(  # type: ignore[arg-type,return-value]
        Actor, resolved.model, resolved.grid, 0.0
    )
    # The cache between calls makes a call for each token cheap.
    engine, conversation, drawn = NativeEngine(actor, keep_cache=True), list[dict[str, str]](), 0
    sampling = dataclasses.replace(
        resolved.sampling, temperature=options.temperature, top_p=options.top_p, stop_ids=checked_run.stop_ids
    )
    for message in messages:
        conversation.append({"role": "user", "content": message})
        prompt, response, answer = codec.chat(conversation, None), list[int](), ""
        limit = len(prompt) + options.max_new_tokens
        while len(response) < options.max_new_tokens and not {*response[-1:]} & {*checked_run.stop_ids}:
            one = dataclasses.replace(sampling, max_new_tokens=1, max_length=limit, seed=options.seed + drawn)
            response += engine.generate([prompt + response], one).responses()[0].tolist()
            drawn += 1
            # A replacement character at the end is a letter whose other bytes are still to come.
            if not (text := codec.decode(response)).endswith("\ufffd"):
                write(text[len(answer) :])
                answer = text
        write((text := codec.decode(response))[len(answer) :])
        conversation.append({"role": "assistant", "content": text})
        yield text
