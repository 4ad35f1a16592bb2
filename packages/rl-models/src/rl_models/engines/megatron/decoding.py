"""Decoding on a Megatron-Core model with a KV cache, through one pipeline stage after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_utils.pipeline_parallel import run_schedule
from parallel_layers.data.micro_batch_packing import pack_micro_batches
from rl_models.engines.continuation import continue_sequences, on_all_ranks
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
    """Decode on every tp and cp rank alike; see `Engine.decoding`. Megatron's global state stays entered.

    Args:
        model: This rank's chunks.
        num_sequences, max_length: As `Engine.decoding` says.
        vocab_size, tokens_multiple_of, micro_batches_multiple_of: The engine's.
    """
    # Interleaving wants as many micro-batches as stages.
    more = micro_batches_multiple_of - 1
    fillers = pack_micro_batches([], [[]] * more, multiple_of=tokens_multiple_of, device=model.grid.device)
    lengths = [0] * num_sequences
    with model.entered() as megatron, torch.no_grad():
        caches = [chunk.new_cache(num_sequences, max_length) for chunk in model.chunks]

        def next_logits(tokens: Sequence[Tensor], keep: Sequence[int] | None = None) -> Tensor:
            if keep is not None:
                for cache in caches:
                    cache.select(keep)
                lengths[:] = [lengths[n] for n in keep]
            packed = continue_sequences(tokens, lengths, tokens_multiple_of)
            for n, new in enumerate(tokens):
                lengths[n] += len(new)
            outputs = run_schedule(
                model.chunks, [packed, *fillers], megatron, next_token=True, caches=caches, broadcast=False
            )
            logits = outputs[0] if outputs else None
            assert logits is None or isinstance(logits, Tensor)
            return on_all_ranks(logits, (len(tokens), vocab_size), model.grid)

        yield next_logits
