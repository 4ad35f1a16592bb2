"""Decoding on a Megatron-Core model with a KV cache, through one pipeline stage after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_utils.pipeline_parallel import run_schedule
from parallel_layers.data.micro_batches import pack_micro_batches
from rl_models.engines.continuation import Continuation, on_all_ranks
from rl_models.engines.engine import NextLogits
from rl_models.engines.megatron.model import MegatronModel


@contextmanager
def decoding(
    model: MegatronModel,
    num_sequences: int,
    max_length: int,
    *,
    vocab_size: int,
    tokens_multiple_of: int,
    micro_batches_multiple_of: int,
) -> Iterator[NextLogits]:
    """Decode on every tp and cp rank, inside Megatron's global state; see `Engine.decoding`.

    Args:
        model: This rank's chunks.
        num_sequences, max_length: See `Engine.decoding`.
        vocab_size, tokens_multiple_of, micro_batches_multiple_of: See `Engine`.
    """
    # The interleaved schedule needs as many micro-batches as stages.
    more = micro_batches_multiple_of - 1
    fillers = pack_micro_batches([], [[]] * more, multiple_of=tokens_multiple_of, device=model.grid.device)
    with model.entered() as megatron, torch.no_grad():
        caches = [chunk.new_cache(num_sequences, max_length) for chunk in model.chunks]
        continuation = Continuation(caches, num_sequences, tokens_multiple_of)

        def next_logits(tokens: Sequence[Tensor], keep: Sequence[int] | None = None) -> Tensor:
            packed = continuation.pack(tokens, keep)
            outputs = run_schedule(
                model.chunks, [packed, *fillers], megatron, next_token=True, caches=caches, broadcast=False
            )
            logits = outputs[0] if outputs else None
            assert logits is None or isinstance(logits, Tensor)
            return on_all_ranks(logits, (len(tokens), vocab_size), model.grid)

        yield next_logits
