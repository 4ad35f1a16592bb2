"""Requests and responses in the form of vLLM, and the log-probs that requests share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from parallel_models import SamplingOptions
from rl_train.engines.interface import Request, Response


class LogProbs:
    """Which log-probs vLLM's sampler reports; requests that differ in this wait for each other, in order.

    Training has the distribution at the sampling temperature, or the distribution over a sampling mask. vLLM reports
    both by itself, but for a truncation without masks, and for masks where several tokens are as likely as the last.
    Requests whose log-probs nobody reads are as requests without truncation. `choose` is `VllmWorker.set_log_probs` of
    all workers.
    """

    def __init__(self, choose: Callable[[float | None, int | None], Awaitable[Any]]) -> None:
        self._choose = choose
        self._chosen: tuple[float | None, int | None] = (None, None)
        self._turn, self._idle, self._count = asyncio.Lock(), asyncio.Event(), 0
        self._idle.set()

    @asynccontextmanager
    async def like(self, sampling: SamplingOptions) -> AsyncIterator[None]:
        """Wait until the sampler reports the log-probs of these options, and have it do so until the exit."""
        async with self._turn:
            if (wanted := _log_probs_of(sampling)) != self._chosen:
                await self._idle.wait()
                await self._choose(*wanted)
                self._chosen = wanted
            self._count += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()


def _log_probs_of(sampling: SamplingOptions) -> tuple[float | None, int | None]:
    """Return the arguments of `VllmWorker.set_log_probs`."""
    if sampling.keep_sampling_mask:
        return None, sampling.top_k
    before_truncation = sampling.log_probs and sampling.truncates and sampling.temperature
    return (sampling.temperature if before_truncation else None), None


def parameters_of(request: Request, sampling: SamplingOptions, vocab_size: int, *, in_parts: bool) -> Any:
    """Return vLLM's parameters of a request, whose tokens come in parts or all at the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    width = sampling.top_k if sampling.keep_sampling_mask else None
    temperature, _ = _log_probs_of(sampling)
    return SamplingParams(
        n=sampling.n if sampling.temperature else 1,
        temperature=sampling.temperature if temperature is None else 1.0,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.limit(len(request.prompt)),
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        seed=request.seed,
        logprobs=min(width or 0, vocab_size),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
    )


def reading_parameters(top_k: int) -> Any:
    """Return vLLM's parameters of a sequence that it reads, for the log-probs of its tokens and the `top_k` likeliest.

    vLLM draws one token behind it.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_of(request: Request) -> dict[str, Any]:
    """Return a prompt in the form of vLLM, which replaces the one token of each image by all tokens of the image."""
    if not request.images:
        return {"prompt_token_ids": request.prompt}
    return {"prompt_token_ids": list(request.short), "multi_modal_data": {"image": list(request.images)}}


class DrawnTokens:
    """The tokens of a response so far, `ids`.

    vLLM's log-probs are flat: each token's log-prob, followed by those of the kept tokens.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self.ids = list[int]()
        self._log_probs, self._versions = list[float](), list[int]()
        self._kept: list[list[int]] | None = [] if sampling.keep_sampling_mask else None
        self._unknown = sampling.truncates and not sampling.log_probs
        self._routing: Tensor | None = None

    def add(self, output: Any, version: int | None) -> None:
        """Add an output of vLLM, drawn with a version of the weights.

        Raises:
            ValueError: A log-prob is not finite.
        """
        self.ids += output.token_ids
        if version is not None:
            self._versions += [version] * len(output.token_ids)
        if output.routed_experts is not None:  # with the last output, for all tokens
            self._routing = torch.as_tensor(output.routed_experts).to(torch.int16)
        flat = output.logprobs
        log_probs = [flat.logprobs[start] for start in flat.start_indices]
        for number, log_prob in enumerate(log_probs, len(self._log_probs) + 1):
            if not math.isfinite(log_prob):
                raise ValueError(
                    f"vLLM gives token {number} of a response the log-prob {log_prob}: the model has diverged, or its "
                    "checkpoint is broken"
                )
        self._log_probs += [math.nan] * len(log_probs) if self._unknown else log_probs
        if self._kept is not None:
            self._kept += [
                list({flat.token_ids[i] for i in range(start, end) if flat.logprobs[i] > -math.inf})
                for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
            ]

    def response(self) -> Response:
        """Return the response."""
        return Response(self.ids, self._log_probs, self._kept, self._versions or None, routing=self._routing)
