"""The native engine: of the actor itself (`NativeEngine`), and of a model apart from it (`Native`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ckpt.transfer import TargetShards, receive_hf
from parallel_layers import ParallelDims
from parallel_models import EngineOptions, GenerationOptions, Grid, SamplingOptions, load_engine
from parallel_models.generation import Prompt, ResponseStream, draw_responses, end_sessions
from parallel_models.training import TrainedModel
from rl_models import Batch, Policy
from rl_train.engines.interface import Request, Response, Responses, Step
from rl_train.weight_sync.buckets import NamedTensors


class NativeEngine:
    """A `RolloutEngine` on the actor that learns: it needs no weight sync.

    Args:
        actor: An `Actor` on one rank, `WholeBatches` or a `RayModelGroup`.
        **options: The options of `GenerationOptions` beside those of the draws.
    """

    def __init__(self, actor: Policy, **options: Any) -> None:
        self.actor, self.version, self._options = actor, 0, options

    def generate(self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions) -> Batch:
        """See `RolloutEngine`."""
        return self.actor.generate(prompts, **vars(sampling), **self._options)

    def generate_async(
        self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions
    ) -> Future[Batch]:
        """See `RolloutEngine`. The actor generates at once: it cannot learn at the same time."""
        future: Future[Batch] = Future()
        future.set_result(self.generate(prompts, sampling))
        return future

    def update_weights(self, actor: Policy, version: int) -> None:
        """See `RolloutEngine`; the actor has its own weights already.

        Raises:
            ValueError: The actor is another one.
        """
        if actor is not self.actor:
            raise ValueError("a NativeEngine generates with the actor it was built with; build another engine")
        self.version = version

    def close(self) -> None:
        """See `RolloutEngine`."""


class Native:
    """A `StreamingEngine` and a `ShardedEngine`: a model of `parallel_models`, on one device or as one rank of a grid.

    The model has no optimizer. Every rank of a grid calls each method, with the same arguments; see `NativeRanks`.

    Args:
        model: The checkpoint folder.
        dtype: The dtype of the weights (default: as stored in the checkpoint).
        device: The device (default: this process's current GPU if there is one, else the CPU).
        max_tokens: Maximum number of prompt tokens in one forward pass.
        max_length: The number of tokens of a sequence that the cache of `step` is made for (default: of the first
            request). A longer request waits until the others are complete.
        tp_invariant: Compute log-probs with the bits of an actor with `tp_invariant`.
        stale_cache: What `load` does between two steps with the keys and values of older weights: keep, or recompute.
        dims: The grid, over the default process group (default: one rank).
        **options: The options of `GenerationOptions` beside those of the draws.

    Raises:
        ValueError: As `load_engine`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_tokens: int = 16384,
        max_length: int = 0,
        tp_invariant: bool = False,
        stale_cache: Literal["keep", "recompute"] = "keep",
        dims: ParallelDims = ParallelDims(),  # noqa: B008
        **options: Any,
    ) -> None:
        grid = Grid.build(dims, device=device)
        self._engine = load_engine(model, "causal_lm", grid, EngineOptions(dtype=dtype, tp_invariant=tp_invariant))
        self._model = TrainedModel(self._engine, None)
        self._max_tokens, self._options = max_tokens, options
        self._drafts = GenerationOptions(max_new_tokens=1, **options).drafts
        self._engine.require_drafts(self._drafts)
        self._longest, self._recompute = max_length, stale_cache == "recompute"
        # The versions of the weights and of the next weights; the requests in flight, and those that wait.
        self._version = self._coming = 0
        self._stream: ResponseStream | None = None
        self._waiting: deque[tuple[int, Request, SamplingOptions]] = deque()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._engine.grid.device

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the responses are drawn at once."""
        _require_text(requests)
        self._end_stream()
        options = GenerationOptions(**vars(sampling), **self._options, keep_cache=True)
        rows = [Prompt(torch.tensor(request.prompt, device=self.device)) for request in requests]
        uniforms = torch.stack([_uniforms(request.seed, sampling) for request in requests])
        drawn = draw_responses(self._engine, rows, options, self._max_tokens, uniforms.to(self.device))
        tokens, log_probs = drawn.tokens.tolist(), drawn.log_probs.tolist()
        masks = [None] * len(drawn.lengths) if drawn.mask is None else drawn.mask.split(drawn.lengths)
        responses = [
            Response(
                tokens[number][:length],
                log_probs[number][:length],
                None if (mask := masks[number]) is None else mask.tolist(),
                steps=drawn.steps[number] * (self._drafts > 0),
            )
            for number, length in enumerate(drawn.lengths)
        ]
        answers = [responses[start : start + sampling.n] for start in range(0, len(responses), sampling.n)]
        return lambda: answers

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`; the parameters are written in place."""
        shards = self._engine.shards()
        self._renew(lambda: receive_hf(named_tensors, shards.layout, shards.chunks))

    def shards(self) -> list[TargetShards]:
        """See `ShardedEngine`."""
        shards = self._engine.shards()
        return [TargetShards.of_model(shards.layout, shards.chunks)]

    def fill(self, fill: Callable[[Sequence[Mapping[str, Tensor]]], None]) -> None:
        """See `ShardedEngine`."""
        self._renew(lambda: fill([tensors for _, tensors in self._engine.shards().chunks]))

    def _renew(self, write: Callable[[], None]) -> None:
        """Have a function write the parameters, and go on with them."""
        end_sessions()
        write()
        self._version = self._coming
        if self._stream is not None:
            self._stream.renew(self._version, recompute=self._recompute)

    def add(self, key: int, request: Request, sampling: SamplingOptions) -> None:
        """See `StreamingEngine`. A request waits while others are drawn with other options than its own."""
        _require_text([request])
        sampling.limit(len(request.prompt))
        self._waiting.append((key, request, sampling))

    def step(self) -> Step:
        """See `StreamingEngine`."""
        try:
            while self._waiting and (stream := self._stream_for(*self._waiting[0][1:])) is not None:
                key, request, sampling = self._waiting.popleft()
                limit = sampling.limit(len(request.prompt))
                stream.add(key, request.prompt, _uniforms(request.seed, sampling), limit)
            begun, complete = ([], []) if self._stream is None else self._stream.step()
        except BaseException:
            self._end_stream()
            raise
        counts_steps = self._drafts > 0
        answers = [
            (key, [Response(*response[:-1], steps=response.steps * counts_steps) for response in responses])
            for key, responses in complete
        ]
        return Step([(key, self._version) for key in begun], answers)

    def cancel(self, key: int) -> None:
        """See `StreamingEngine`."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != key)
        if self._stream is not None:
            self._stream.cancel(key)

    def expect(self, version: int) -> None:
        """See `StreamingEngine`."""
        self._coming = version

    def _stream_for(self, request: Request, sampling: SamplingOptions) -> ResponseStream | None:
        """Return the stream for a request, a new one where no other request is in flight; None: the request waits."""
        options = GenerationOptions(**vars(replace(sampling, n=1, seed=0, max_length=None)), **self._options)
        stream = self._stream
        longest = len(request.prompt) + sampling.limit(len(request.prompt))
        if stream is not None and (stream.options, max(stream.max_length, longest)) != (options, stream.max_length):
            if len(stream):
                return None
            stream.close()
            stream = None
        if stream is None:
            self._longest = max(self._longest, longest)
            stream = ResponseStream(self._engine, options, self._longest, self._max_tokens, self._version)
            self._stream = stream
        return stream

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._waiting.clear()

    def sleep(self) -> None:
        """See `LocalEngine`; the cache between calls and responses that are not complete are lost."""
        self._end_stream()
        self._model.offload()

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._model.onload()

    def close(self) -> None:
        """See `LocalEngine`."""
        self.sleep()


def _require_text(requests: Sequence[Request]) -> None:
    if any(request.images for request in requests):
        raise ValueError(
            "a native engine on separate devices computes text alone; leave rollouts.devices out, so that the policy "
            "itself draws, or take vLLM"
        )


def _uniforms(seed: int, sampling: SamplingOptions) -> Tensor:
    """Return the numbers `[n, L]` that decide the tokens of a request, the same on every device."""
    return torch.rand(sampling.n, sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed))
