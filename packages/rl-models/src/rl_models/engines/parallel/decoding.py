"""Decoding with a KV cache on the native models: every tp and cp rank alike, one pipeline stage after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from rl_models.engines.continuation import continue_sequences, on_all_ranks
from rl_models.engines.engine import NextLogits
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
    *,
    num_sequences: int,
    max_length: int,
) -> Iterator[NextLogits]:
    """Decode `num_sequences` sequences of at most `max_length` tokens; see `Engine.decoding`.

    Args:
        model, stages, pipeline, grid: of the engine.
        hidden_shape: number of tokens -> shape of what goes from stage to stage.
    """
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(gathered(stage, reshard_blocks=grid.dims.pp == 1))
        stack.enter_context(torch.no_grad())
        cache = model.new_cache(num_sequences, max_length)
        lengths = [0] * num_sequences

        def run(packed: PackedSequence, stage: Stage, hidden: Tensor | None) -> Tensor:
            method = model.next_logits if stage.chunk.last else model
            logits: Tensor = stage.run(lambda hidden: method(packed, hidden, chunk=stage.chunk, cache=cache), hidden)
            return logits

        def next_logits(tokens: Sequence[Tensor], keep: Sequence[int] | None = None) -> Tensor:
            if keep is not None:
                cache.select(keep)
                lengths[:] = [lengths[n] for n in keep]
            packed = continue_sequences(tokens, lengths, model.tokens_multiple_of)
            for n, new in enumerate(tokens):
                lengths[n] += len(new)
            logits: Tensor | None
            if pipeline is None:
                logits = run(packed, stages[0], None)
            else:
                logits = pipeline.relay(hidden_shape(packed.num_tokens), partial(run, packed))
            return on_all_ranks(logits, (len(tokens), model.config.vocab_size), grid)

        yield next_logits
