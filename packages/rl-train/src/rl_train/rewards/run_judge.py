"""`RunJudge`: a judge that is a model of the run, which all ranks of the run draw with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from ckpt import Checkpoint
from parallel_models.engine import checkpoint_folder, max_positions
from rl_train.data.codec import TextCodec
from rl_train.options.options import TrainOptions
from rl_train.rewards.judge import Judge, Judgements, not_judged
from rl_train.rewards.rubric import REFERENCE, Rubric
from rl_train.rewards.worker import Outcome


class _Question(NamedTuple):
    """A request that waits for its reply: the prompt `ids` of the model, and the responses at these places."""

    body: str
    places: Sequence[int]
    ids: list[int]
    outcomes: Future[dict[int, Outcome]]


class RunJudge(Judge):
    """A `Judge` whose questions a model of the run answers, between `questions` and `answer`.

    Args:
        rubric, judgements: See `Judge`.
        options: The options of the run.
    """

    def __init__(self, rubric: Rubric, judgements: Judgements, options: TrainOptions) -> None:
        super().__init__(rubric, judgements)
        folder = folder_of_judge(rubric, options)
        self._codec = TextCodec(folder)
        self._room = longest_judgement(folder, options) - rubric.sampling["max_new_tokens"]
        self._open = list[_Question]()

    def judged(self, body: str, places: Sequence[int]) -> Future[dict[int, Outcome]]:
        """See `Judge`."""
        future: Future[dict[int, Outcome]] = Future()
        if (outcomes := self.earlier(body, places)) is not None:
            future.set_result(outcomes)
            return future
        try:
            self._open.append(_Question(body, places, self._ids(body), future))
        except ValueError as error:
            future.set_result(dict.fromkeys(places, not_judged(error)))
        return future

    @property
    def questions(self) -> list[list[int]]:
        """Return the prompts of the requests that wait for a reply."""
        return [question.ids for question in self._open]

    def answer(self, replies: Sequence[Sequence[int]], seconds: float) -> None:
        """Give the reply to each of the `questions`, and the time in which they were drawn."""
        tokens = sum(len(question.ids) + len(reply) for question, reply in zip(self._open, replies, strict=True))
        self.count(calls=len(replies), tokens=tokens, seconds=seconds)
        for question, reply in zip(self._open, replies, strict=True):
            text = self._codec.decode(reply)
            question.outcomes.set_result(self.conclude(question.body, question.places, text))
        self._open.clear()

    def close(self) -> None:
        """See `Judge`."""

    def _ids(self, body: str) -> list[int]:
        """Return the prompt of a request; ValueError if it leaves no room for the reply."""
        ids = self._codec.chat(json.loads(body)["messages"], None)
        if len(ids) > self._room:
            raise ValueError(
                f"a question of {len(ids)} tokens is longer than {self._room}, the room beside the reply; shorten the "
                "rubric or its max_tokens, or give a larger --max-tokens where the judge has the positions"
            )
        return ids


def folder_of_judge(rubric: Rubric, options: TrainOptions) -> Path:
    """Return the checkpoint folder of a model of the run that judges.

    Raises:
        ValueError: There is no such folder.
    """
    if rubric.model == REFERENCE:
        return options.reference or options.model
    return Path(checkpoint_folder(rubric.model))


def longest_judgement(folder: Path, options: TrainOptions) -> int:
    """Return the maximum number of tokens of a question with its reply, for a model of the run in this folder."""
    return min(options.max_tokens, max_positions(Checkpoint(folder)) or options.max_tokens)
