"""The interfaces of engines: `RolloutEngine` for a run, and `LocalEngine` below it for one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ckpt.transfer import TargetShards
from parallel_models import SamplingOptions
from rl_models import Batch, Policy
from rl_train.weight_sync.buckets import NamedTensors
from rl_train.weight_sync.transport import WeightMessage

# A field of the batch, `[T]` int64: the version of the weights that drew each response token; -1 elsewhere.
VERSION = "version"


class RolloutEngine(Protocol):
    """Draws responses with the weights of an actor.

    All ranks of a run call each method, in the same order and with the same arguments; under Ray the one process of
    the loop does. A custom engine needs exactly these methods and this attribute.

    Attributes:
        version: The version of the weights that the next responses are drawn with.
    """

    version: int

    def generate(self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions) -> Batch:
        """Return each prompt with its `sampling.n` responses, prompt by prompt.

        Prompts with images come as a batch; its `visual` goes into the result.

        Returns:
            The responses are in the mask. The field `log_probs` `[T]` holds the sampler's own log-prob of each response
            token at `sampling.temperature`, before any truncation; 0 elsewhere. With `sampling.keep_sampling_mask` the
            log-probs are those among the kept tokens, the batch's `sampling_mask`. With `sampling.log_probs=False` they
            may be NaN.
            Engines apart from the actor add the field `version` (`VERSION`); elsewhere the run adds it.

        Raises:
            ValueError: A prompt or an option is wrong, or logits are not finite.
            RuntimeError: The last weight sync failed.
        """

    def generate_async(
        self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions
    ) -> Future[Batch]:
        """Return a future of `generate`; an engine on separate devices draws meanwhile.

        All ranks call `result` of their futures in the order of the calls, and before the next `update_weights`. The
        responses come from the weights of this moment. An engine that has lost them may draw with the weights that the
        actor has when `result` is called; then `future.drawn_anew` is True.
        """

    def update_weights(self, actor: Policy, version: int) -> None:
        """Take the weights of an actor, of this version; all its ranks call the method.

        `stream_weights` of an `Actor`, `WholeBatches` or `RayModelGroup` gives the tensors.

        Raises:
            RuntimeError: The weight sync failed; the engine refuses to generate until one succeeds.
        """

    def close(self) -> None:
        """End the engine and its processes."""


class Request(NamedTuple):
    """A prompt, and the seed of its responses.

    `images` are the images of the prompt; `short` is then the prompt with one token in place of each.
    """

    prompt: list[int]
    seed: int
    images: tuple[Any, ...] = ()
    short: Sequence[int] = ()


class Response(NamedTuple):
    """The tokens that continue a prompt, and their log-probs at the sampling temperature, before any truncation.

    With `keep_sampling_mask` the log-probs are over the tokens that the truncation kept. `kept` lists these tokens for
    each token of the response. `versions` are those of the weights that drew each token, where
    weights change meanwhile. `steps` are the steps of the model that drew the response; 0: the engine does not count.
    `routing` `[R, M, k]` int16 are the experts of the first R tokens of prompt and response, in all layers or in the M
    layers with routed experts, where the engine reports them.
    """

    tokens: list[int]
    log_probs: list[float]
    kept: list[list[int]] | None = None
    versions: list[int] | None = None
    steps: int = 0
    routing: Tensor | None = None


# The `n` responses to each request, in order.
Responses = list[list[Response]]


class WeightsLostError(RuntimeError):
    """The engine has started again without weights; it needs `update_weights`."""


class EngineEnded(RuntimeError):
    """Worker processes of an engine have ended, and the process that holds the engine ends, too."""


class LocalEngine(Protocol):
    """An engine of this process, or a handle of engines in other processes.

    `EngineOnRanks` makes a `RolloutEngine` of it. The methods are called one at a time, from one thread.
    """

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """Start on the requests and return a function that waits for the responses.

        The function raises WeightsLostError if the requests must be repeated after a new weight sync.
        """

    def load(self, named_tensors: NamedTensors) -> None:
        """Take all tensors of a weight sync, whole and under their Hugging Face names.

        A tensor's memory is valid until the next tensor is taken: clone a tensor to keep it.
        """

    def sleep(self) -> None:
        """Give back the device's memory; no effect on an engine that sleeps."""

    def wake(self) -> None:
        """Take the device's memory again; no effect on an engine that is awake."""

    def close(self) -> None:
        """End the engine."""


class Step(NamedTuple):
    """The keys whose first token has been drawn, with the version of the weights, and the complete responses."""

    begun: list[tuple[int, int]]
    complete: list[tuple[int, list[Response]]]


class StreamingEngine(LocalEngine, Protocol):
    """A `LocalEngine` that takes requests and weights while it draws; `InFlightPool` needs such engines."""

    def add(self, key: int, request: Request, sampling: SamplingOptions) -> None:
        """Begin to draw the responses to a request, in the next steps."""

    def step(self) -> Step:
        """Draw some tokens; after an error no key is left."""

    def cancel(self, key: int) -> None:
        """Draw no more for a key; no effect where its responses are complete."""

    def expect(self, version: int) -> None:
        """Take the version of the weights that `load` brings next."""


class ShardedEngine(LocalEngine, Protocol):
    """A `LocalEngine` whose parameters a weight sync writes in place, box by box."""

    def shards(self) -> list[TargetShards]:
        """Return the shards of each receiver, in the order of `WorkerEngine.receivers`."""

    def fill(self, fill: Callable[[Sequence[Mapping[str, Tensor]]], None]) -> None:
        """Have a function write the parameters of this process, by local name for each chunk."""


class WorkerEngine(LocalEngine, Protocol):
    """A `LocalEngine` whose worker processes receive the weights, such as vLLM's."""

    def receivers(self) -> list[tuple[str, str]]:
        """Return the id of each worker's device (`device_id`) and the key of its receiver; empty: `load` takes them."""

    def receive(self, messages: Sequence[WeightMessage]) -> None:
        """Have each worker take a weight sync, whose messages are in the order of `receivers`.

        Raises:
            Exception: The first error of a worker that has a cause of its own.
        """


class SequenceLogProbs(NamedTuple):
    """Log-probs at temperature 1 of the L tokens of a sequence, each given the tokens before it.

    The first token has none: 0, and ids of -1. `top_ids` and `top_log_probs` `[L, K + 1]` are those of the K likeliest
    tokens in place of each token, and of the token itself; ids of -1 where there are fewer.
    """

    log_probs: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], rows: Sequence[Mapping[int, float]], top_k: int) -> SequenceLogProbs:
        """Return the log-probs of tokens from the log-probs of ids at each token; none at the first.

        Raises:
            RuntimeError: There is not a row for each token, a row lacks its token or some of the `top_k`, or log-probs
                are not finite or add up to more than 1.
        """
        if len(rows) != len(tokens):
            raise RuntimeError(f"the teacher's engine has log-probs of {len(rows)} of {len(tokens)} tokens")
        width = top_k + 1
        drawn, ids, values = [0.0] * len(tokens), [[-1] * width for _ in tokens], [[0.0] * width for _ in tokens]
        for place, (token, row) in enumerate(zip(tokens[1:], rows[1:], strict=True), start=1):
            if token not in row or not top_k <= len(row) <= top_k + 1:
                raise RuntimeError(
                    f"the teacher's engine has {len(row)} log-probs in place of token {place}, {token}; it must have "
                    f"that of the token and of the {top_k} likeliest"
                )
            if not all(map(math.isfinite, row.values())) or math.fsum(map(math.exp, row.values())) > 1.001:
                raise RuntimeError(
                    f"the teacher's engine gives no log-probs in place of token {place}: {list(row.values())[:3]}; its "
                    "checkpoint may be broken, or the server reports logits"
                )
            drawn[place] = row[token]
            ids[place][: len(row)], values[place][: len(row)] = row, row.values()
        return cls(torch.tensor(drawn), torch.tensor(ids).view(-1, width), torch.tensor(values).view(-1, width))


class ReadingEngine(Protocol):
    """An engine with weights of its own, which reads sequences."""

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        """Return the log-probs of each sequence's tokens, and of the `top_k` likeliest tokens at their places."""

    def close(self) -> None:
        """End the engine."""
