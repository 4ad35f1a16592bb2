"""`LocalEngine`: an engine that one process holds, below the interface that the ranks of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rl_models.workers.generation import SamplingOptions
from rl_train.rollouts.handover import Pairs


class Request(NamedTuple):
    """A prompt, and the seed of its responses."""

    prompt: list[int]
    seed: int


class Response(NamedTuple):
    """The tokens that continue a prompt, and their log-probs at the sampling temperature, before top-k and top-p."""

    tokens: list[int]
    log_probs: list[float]


# The `n` responses to each request, in order.
Responses = list[list[Response]]


class WeightsLostError(RuntimeError):
    """The engine has started again and needs the weights anew; an update brings them."""


class LocalEngine(Protocol):
    """An engine of this process, or a handle of engines in other processes.

    `EngineOnRanks` makes a `RolloutEngine` of it. The methods are called one at a time, from one thread.
    """

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """Start on the requests and return a function that waits for the responses.

        The function raises WeightsLostError if the requests must be repeated after a new hand-over.
        """
        ...

    def load(self, pairs: Pairs) -> None:
        """Take all tensors of a hand-over; pairs are Hugging Face names and whole tensors."""
        ...

    def sleep(self) -> None:
        """Give back the device's memory; no effect on an engine that sleeps."""
        ...

    def wake(self) -> None:
        """Take the device's memory again; no effect on an engine that is awake."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...
