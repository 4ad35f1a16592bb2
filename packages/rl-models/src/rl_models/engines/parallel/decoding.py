"""Decoding with a KV cache on the native models, through one pipeline stage after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from rl_models.engines.continuation import Continuation, on_all_ranks
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
        model, stages, pipeline, grid: Those of the engine.
        hidden_shape: Number of tokens -> shape of the hidden states between stages.
        num_sequences: The number of sequences.
        max_length: The largest length of a sequence.
    """
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(gathered(stage, reshard_blocks=grid.dims.pp == 1))
        stack.enter_context(torch.no_grad())
        cache = model.new_cache(num_sequences, max_length)
        continuation = Continuation([cache], num_sequences, model.tokens_multiple_of)

        def run(packed: PackedSequence, stage: Stage, hidden: Tensor | None) -> Tensor:
            method = model.next_logits if stage.chunk.last else model
            logits: Tensor = stage.run(lambda hidden: method(packed, hidden, chunk=stage.chunk, cache=cache), hidden)
            return logits

        def next_logits(tokens: Sequence[Tensor], keep: Sequence[int] | None = None) -> Tensor:
            packed = continuation.pack(tokens, keep)
            logits: Tensor | None
            if pipeline is None:
                logits = run(packed, stages[0], None)
            else:
                logits = pipeline.relay(hidden_shape(packed.num_tokens), partial(run, packed))
            return on_all_ranks(logits, (len(tokens), model.config.vocab_size), grid)

        yield next_logits
