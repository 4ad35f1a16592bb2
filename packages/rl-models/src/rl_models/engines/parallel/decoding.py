"""Decoding with a KV cache on the native models, through one pipeline stage after another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache
from parallel_layers.shared_weights import view_of
from rl_models.engines.decoding import CacheOptions, Decoding, from_last_stage
from rl_models.engines.fsdp import gathered
from rl_models.engines.parallel.pipeline import Pipeline
from rl_models.engines.parallel.stage import Stage
from rl_models.grid import Grid
from rl_models.models.language_models import CausalLM


@contextmanager
def decode(
    model: CausalLM,
    stages: Sequence[Stage],
    pipeline: Pipeline | None,
    grid: Grid,
    hidden_shape: Callable[[int], tuple[int, int]],
    options: CacheOptions,
) -> Iterator[Decoding]:
    """Yield the model for generation; see `Engine.decoding`.

    Args:
        model, stages, pipeline, grid: Those of the engine.
        hidden_shape: Number of tokens -> shape of the hidden states between stages.
        options: The size of the cache.
    """
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(gathered(stage, reshard_blocks=grid.dims.pp == 1))
        stack.enter_context(torch.no_grad())
        plain = view_of(model, _without_hooks)

        def forward(packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool) -> Tensor:
            (cache,) = caches

            def run(stage: Stage, hidden: Tensor | None) -> Tensor:
                if stage.chunk.last and logits:
                    return plain.next_logits(packed, hidden, chunk=stage.chunk, cache=cache, exact=options.exact)
                output: Tensor = plain(packed, hidden, chunk=stage.chunk, cache=cache)
                return output

            if pipeline is None:
                return run(stages[0], None)
            result = pipeline.relay(hidden_shape(packed.num_tokens), run)
            if not logits:
                return packed.input_ids
            return from_last_stage(result, (packed.num_sequences, model.config.vocab_size), grid)

        # The sizes of an exchange of experts' tokens go to the host.
        capturable = grid.device.type == "cuda" and pipeline is None and grid.dims.ep == 1 and not options.exact
        yield Decoding(options.build([model.new_cache], grid), forward, options.exact, capturable)


def _without_hooks(module: nn.Module, view: nn.Module) -> None:
    """Remove FSDP2's hooks from the view: all parameters stay gathered, and a CUDA graph cannot capture the hooks."""
    view.__dict__["_forward_pre_hooks"], view.__dict__["_forward_hooks"] = OrderedDict(), OrderedDict()
