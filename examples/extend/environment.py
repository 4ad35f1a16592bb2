"""An environment of several turns: guess a number from 1 to 9, and hear whether it is higher or lower."""

from collections.abc import Mapping
from typing import Any

from rl_train.environments import Environment, Step
from rl_train.rewards import Response


class Guess(Environment):
    """A row has "messages", the question, and "number", the right answer."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.number, self.guesses = int(row["number"]), 0

    def step(self, response: Response) -> Step:
        self.guesses += 1
        if not response.strip().isdecimal():
            return Step(reward=-1.0)
        guess = int(response)
        if guess == self.number:
            return Step(reward=1 / self.guesses)
        return Step("higher" if guess < self.number else "lower")
