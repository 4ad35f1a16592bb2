"""The native engine on devices apart from the actor: `Native` in a process, and `SeparateEngine` for a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ckpt.transfer import receive_hf
from parallel_layers import ParallelDims
from parallel_models import EngineOptions, GenerationOptions, Grid, SamplingOptions, load_engine
from parallel_models.generation import Prompt, draw_responses
from parallel_models.training import TrainedModel
from rl_models import Policy
from rl_train.engines.engine_on_ranks import EngineOnRanks
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.interface import Request, Response, Responses
from rl_train.engines.process import processes
from rl_train.weight_sync.buckets import NamedTensors


class Native:
    """A `LocalEngine`: a model of `parallel_models` on one device, without an optimizer.

    Args:
        model: The checkpoint folder.
        dtype: The dtype of the weights (default: as stored in the checkpoint).
        device: The device (default: the process's first GPU if there is one, else the CPU).
        max_sequences, cache_gib: See `GenerationOptions`.
        max_tokens: Maximum number of prompt tokens in one forward pass.

    Raises:
        ValueError: As `load_engine`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_sequences: int = 512,
        cache_gib: float | None = None,
        max_tokens: int = 16384,
    ) -> None:
        grid = Grid.build(ParallelDims(), device=device)
        self._engine = load_engine(model, "causal_lm", grid, EngineOptions(dtype=dtype))
        self._model = TrainedModel(self._engine, None)
        self._max_sequences, self._cache_gib, self._max_tokens = max_sequences, cache_gib, max_tokens

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the responses are drawn at once."""
        if any(request.images for request in requests):
            raise ValueError(
                "a native engine on separate devices computes text alone; leave rollouts.devices out, so that the "
                "policy itself draws, or take vLLM"
            )
        options = GenerationOptions(**vars(sampling), max_sequences=self._max_sequences, cache_gib=self._cache_gib)
        device = self._engine.grid.device
        rows = [Prompt(torch.tensor(request.prompt, device=device)) for request in requests]
        uniforms = torch.stack([_uniforms(request.seed, sampling) for request in requests])
        drawn = draw_responses(self._engine, rows, options, self._max_tokens, uniforms.to(device))
        tokens, log_probs = drawn.tokens.tolist(), drawn.log_probs.tolist()
        masks = None if drawn.masks is None else drawn.masks.tolist()
        responses = [
            Response(
                tokens[number][:length],
                log_probs[number][:length],
                None if masks is None else [[token for token in row if token >= 0] for row in masks[number][:length]],
            )
            for number, length in enumerate(drawn.lengths)
        ]
        answers = [responses[start : start + sampling.n] for start in range(0, len(responses), sampling.n)]
        return lambda: answers

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`; the parameters are written in place."""
        shards = self._engine.shards()
        receive_hf(named_tensors, shards.layout, shards.chunks)

    def sleep(self) -> None:
        """See `LocalEngine`; there is no cache between calls."""
        self._model.offload()

    def wake(self) -> None:
        """See `LocalEngine`."""
        self._model.onload()

    def close(self) -> None:
        """See `LocalEngine`."""
        self._model.offload()


def _uniforms(seed: int, sampling: SamplingOptions) -> Tensor:
    """Return the numbers `[n, L]` that decide the tokens of a request, the same on every device."""
    return torch.rand(sampling.n, sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed))


class SeparateEngine(EngineOnRanks):
    """Native engines for a run, each in a process on a device of its own; the first rank sends prompts and weights.

    Args:
        actor, model: See `EngineOnRanks`.
        devices: The ids of the devices, one engine each, as in `CUDA_VISIBLE_DEVICES`; an empty id is a CPU.
        check: Compare a checksum of each tensor that goes to another process.
        timeout: See `processes`.
        dtype, max_sequences, cache_gib: See `Native`.

    Raises:
        ValueError: An engine does not start.
    """

    def __init__(
        self,
        actor: Policy,
        model: str | Path,
        *,
        devices: Sequence[str],
        check: bool = False,
        timeout: float = 1800.0,
        dtype: torch.dtype | None = None,
        max_sequences: int = 512,
        cache_gib: float | None = None,
    ) -> None:
        make = partial(Native, str(model), dtype=dtype, max_sequences=max_sequences, cache_gib=cache_gib)

        def start() -> EnginePool:
            return EnginePool(processes(make, devices, timeout=timeout), check=check, max_responses=max_sequences)

        super().__init__(actor, model, start, ranks=[0])
