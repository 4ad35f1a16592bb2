"""`Scorer`: have the rewards score a batch of responses, on one rank for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from rl_models import Batch
from rl_train.data.mixture import split_sources
from rl_train.data.prompts import Prompt
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.judging import JudgingModel
from rl_train.rewards.function import Rewards, Scores
from rl_train.rewards.response import Response
from rl_train.rewards.worker import Item
from rl_train.trajectories.episodes import episode_ids, select_episodes, sum_by_episode, totals
from rl_train.trajectories.shown_turns import shown_turns


@dataclass(frozen=True)
class Scored:
    """The scores of responses `[N]`, the rewards by name whose sum they are, and the number of failures.

    `answers` are the answers that a reward read in the responses; empty without such a reward. `costs` are those of
    judges, by the names of metrics.
    """

    scores: Tensor
    rewards: dict[str, Tensor]
    errors: int
    answers: Sequence[str | None] = ()
    costs: dict[str, float] = field(default_factory=dict)

    def describe(self, *, counts_errors: bool) -> dict[str, float]:
        """Return the mean of each of several rewards, the failures where they are counted, and the judges' costs."""
        named_rewards = self.rewards if len(self.rewards) > 1 else {}
        means = {f"reward/{name}": float(rewards_of_name.mean()) for name, rewards_of_name in named_rewards.items()}
        return means | ({"reward_errors": float(self.errors)} if counts_errors else {}) | self.costs

    @staticmethod
    def concatenate(parts: Sequence[Scored]) -> Scored:
        """Join the scores of several batches."""
        rewards = {name: torch.cat([scored.rewards[name] for scored in parts]) for name in parts[0].rewards}
        costs = {name: sum(scored.costs[name] for scored in parts) for name in parts[0].costs}
        scores, errors = torch.cat([scored.scores for scored in parts]), sum(scored.errors for scored in parts)
        return Scored(scores, rewards, errors, costs=costs)


def question(row: Mapping[str, Any]) -> str | None:
    """Return the question of a row: its text, or the text of the user's last message; None if it has neither."""
    messages = row.get("messages") or [{"role": "user", "content": row.get("text")}]
    if isinstance(messages, str):
        return messages
    asked = next((message.get("content") for message in reversed(messages) if message.get("role") == "user"), None)
    if isinstance(asked, list):
        blocks = [block for block in asked if isinstance(block, Mapping)]
        return " ".join(str(block.get("text", f"({block.get('type')})")) for block in blocks)
    return asked if isinstance(asked, str) else None


@dataclass(frozen=True)
class Scorer:
    """Decode responses for the rewards, and score them.

    `rewards` is None on ranks where `once` (see `Recipe`) does not call its function. `tell` is called with a message
    about rewards that failed. `judges` are the models of the run that judge, by the name of their reward.
    """

    checked_run: CheckedRun
    rewards: Rewards | None
    once: Callable[[Callable[[], Any]], Any]
    tell: Callable[[str], None]
    judges: Mapping[str, JudgingModel] = field(default_factory=dict)

    def as_read(self, prompts: Sequence[Prompt], batch: Batch) -> Iterator[tuple[Any, Any]]:
        """Yield each prompt and its response in a reward's form: text with a tokenizer, else token ids.

        The response of an episode of several samples has the drawn tokens of all, sample by sample.
        """
        codec = self.checked_run.codec
        rewards = totals(batch).get("environment_reward", torch.zeros(len(prompts))).tolist()
        samples = zip(episode_ids(batch).tolist(), batch.split(), batch.split("mask"), strict=True)
        episodes = [list(samples) for _, samples in groupby(samples, lambda sample: sample[0])]
        for prompt, episode, truncated, reward in zip(prompts, episodes, self.truncated(batch), rewards, strict=True):
            ids = [token for _, tokens, mask in episode for token in tokens[mask].tolist()]
            if not codec.available:
                yield prompt.tokens, ids
                continue
            asked = str(prompt.row["text"]) if "text" in prompt.row else codec.decode(prompt.tokens)
            # From the policy's first token on, including messages of the environment; sample by sample.
            shown = [token for _, tokens, mask in episode for token in tokens[mask.cumsum(0) > 0].tolist()]
            raw = codec.decode(shown, special=True)
            yield asked, Response(codec.decode(ids), raw, ids, "length" if truncated else "stop", reward)

    def truncated(self, batch: Batch) -> list[bool]:
        """Say for each response whether the limit of tokens or of turns cut it off."""
        if (cut_off := totals(batch).get("truncated")) is not None:
            return (cut_off > 0).tolist()
        longest, stops = self.checked_run.options.sampling.max_new_tokens, self.checked_run.stop_ids
        return [len(response) == longest and int(response[-1]) not in stops for response in batch.responses()]

    def best_and_worst(
        self, prompts: Sequence[Prompt], batch: Batch, scores: Tensor, most: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the best and the worst response to the first `most` prompts, and better and worse ones of the batch.

        Each has its turns, see `shown_turns`, and its question; `scores` are `[prompts, n]`.
        """
        extremes = [(row.argmax(), row.argmin()) for row in scores[:most]]
        shown = dict.fromkeys((number, int(column)) for number, columns in enumerate(extremes) for column in columns)
        for extreme, index in ((scores[:most].max(), scores.argmax()), (scores[:most].min(), scores.argmin())):
            number, column = divmod(int(index), scores.shape[1])
            if scores[number, column] != extreme:
                shown[number, column] = None
        places = [number * scores.shape[1] + column for number, column in shown]
        turns = shown_turns(select_episodes(batch, places), self.checked_run.codec)
        records = self.records(prompts, batch, scores, [*shown])
        for record, turns_of_record, (number, _) in zip(records, turns, shown, strict=True):
            yield record | {"turns": turns_of_record, "question": question(prompts[number].row)}

    def records(
        self, prompts: Sequence[Prompt], batch: Batch, scores: Tensor, shown: Sequence[tuple[int, int]]
    ) -> Iterator[dict[str, Any]]:
        """Yield the responses `shown`, each the number of a prompt and of its response; scores are `[prompts, n]`."""
        shown_batch = select_episodes(batch, [number * scores.shape[1] + column for number, column in shown])
        read = self.as_read([prompts[number] for number, _ in shown], shown_batch)
        lengths = sum_by_episode(shown_batch, shown_batch.masked_counts).tolist()
        several = len(split_sources(self.checked_run.options.prompts)) > 1
        each = zip(shown, read, lengths, self.truncated(shown_batch), strict=True)
        for (number, column), (asked, answer), length, truncated in each:
            yield {
                **({"source": str(prompts[number].source)} if several else {}),
                "line": prompts[number].line,
                "prompt": asked,
                "response": answer.raw if self.checked_run.options.converses else answer,
                "reward": float(scores[number, column]),
                "response_length": length,
                "truncated": truncated,
            }

    def __call__(self, prompts: Sequence[Prompt], batch: Batch) -> Scored:
        """Score the episodes of a batch, which answer the prompts, one for each episode."""

        @cache
        def items() -> list[Item]:
            read = zip(self.as_read(prompts, batch), prompts, strict=True)
            return [(asked, response, prompt.row) for (asked, response), prompt in read]

        rewards_of_run = cast(Rewards, self.rewards)  # used where `once` calls
        if self.judges:
            for name, questions in self.once(lambda: rewards_of_run.begin(items())).items():
                began = time.monotonic()
                replies = self.judges[name].draw(questions)
                if self.rewards is not None:
                    self.rewards.answer(name, replies, time.monotonic() - began)
        places = [prompt.place for prompt in prompts]
        result = Scores(*self.once(lambda: rewards_of_run.score(items(), places)))
        if result.error is not None:
            count = "a reward failed and counts" if result.errors == 1 else f"{result.errors} rewards failed and count"
            self.tell(f"{count} as 0; {result.error}")
        rewards = {name: torch.tensor(values, dtype=torch.float32) for name, values in result.each.items()}
        failed = totals(batch).get("failed", torch.zeros(len(prompts)))
        total, errors = torch.tensor(result.total, dtype=torch.float32), result.errors + int(failed.sum())
        return Scored(total * (failed == 0), rewards, errors, result.answers, result.costs)
