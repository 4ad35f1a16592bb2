"""Decoding on a Megatron-Core model with a KV cache, through one pipeline stage after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_utils.pipeline_parallel import run_schedule
from parallel_layers import PackedSequence
from parallel_layers.data.micro_batches import pack_micro_batches
from parallel_layers.inference import SequenceCache
from rl_models.engines.decoding import CacheOptions, Decoding, from_last_stage
from rl_models.engines.megatron.model import MegatronModel


@contextmanager
def decoding(
    model: MegatronModel,
    options: CacheOptions,
    *,
    vocab_size: int,
    tokens_multiple_of: int,
    micro_batches_multiple_of: int,
) -> Iterator[Decoding]:
    """Yield the model for generation, inside Megatron's global state; see `Engine.decoding`.

    Args:
        model: This rank's chunks.
        options: The size of the caches.
        vocab_size, tokens_multiple_of, micro_batches_multiple_of: See `Engine`.
    """
    # The interleaved schedule needs as many micro-batches as stages.
    more = micro_batches_multiple_of - 1
    fillers = pack_micro_batches([], [[]] * more, multiple_of=tokens_multiple_of, device=model.grid.device)
    with model.entered() as megatron, torch.no_grad():

        def forward(packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool) -> Tensor:
            outputs = run_schedule(
                model.chunks, [packed, *fillers], megatron, next_token=True, caches=caches, broadcast=False
            )
            if not logits:
                return packed.input_ids
            result = outputs[0] if outputs else None
            assert result is None or isinstance(result, Tensor)
            return from_last_stage(result, (packed.num_sequences, vocab_size), model.grid)

        caches = options.build([chunk.new_cache for chunk in model.chunks], model.grid)
        yield Decoding(caches, forward, options.exact)
