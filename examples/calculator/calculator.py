"""An environment of several turns: the policy may call a calculator, and is rewarded for the right product."""

from collections.abc import Mapping
from typing import Any

from rl_train.environments import Environment, Step
from rl_train.rewards import Response


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Calculator(Environment):
    """A row has "messages", the question, and "answer", the product."""

    tools = (multiply,)

    def reset(self, row: Mapping[str, Any]) -> None:
        self.answer = row["answer"]

    def step(self, response: Response) -> Step:
        """Score the answer; calls of the tool do not come here."""
        return Step(reward=float(response == self.answer))
