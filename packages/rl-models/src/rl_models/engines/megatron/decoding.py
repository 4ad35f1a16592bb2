"""Decoding on a Megatron-Core model with a KV cache, through one pipeline stage after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_utils.pipeline_parallel import run_schedule
from parallel_layers.data.micro_batch_packing import pack_micro_batches
from rl_models.engines.continuation import continue_sequences
from rl_models.engines.engine import NextLogits
from rl_models.grid import Grid

if TYPE_CHECKING:
    from rl_models.engines.megatron.engine import MegatronEngine


@contextmanager
def decoding(engine: MegatronEngine, num_sequences: int, max_length: int) -> Iterator[NextLogits]:
    """See `Engine.decoding`; every tp and cp rank works on all tokens. Megatron's global state stays entered."""
    multiple_of = engine.tokens_multiple_of
    # Interleaving wants as many micro-batches as stages.
    more = engine.micro_batches_multiple_of - 1
    fillers = pack_micro_batches([], [[]] * more, multiple_of=multiple_of, device=engine.grid.device)
    lengths = [0] * num_sequences
    with engine.entered() as megatron, torch.no_grad():
        caches = [chunk.new_cache(num_sequences, max_length) for chunk in engine.chunks]

        def next_logits(tokens: Sequence[Tensor], keep: Sequence[int] | None = None) -> Tensor:
            if keep is not None:
                for cache in caches:
                    cache.select(keep)
                lengths[:] = [lengths[n] for n in keep]
            packed = continue_sequences(tokens, lengths, multiple_of)
            for n, new in enumerate(tokens):
                lengths[n] += len(new)
            outputs = run_schedule(
                engine.chunks, [packed, *fillers], megatron, next_token=True, caches=caches, broadcast=False
            )
            shape = len(tokens), engine.vocab_size
            return _same_on_all_ranks(None if outputs is None else outputs[0], shape, engine.grid)

        yield next_logits


def _same_on_all_ranks(output: object, shape: tuple[int, int], grid: Grid) -> Tensor:
    """The logits of the last stage; of its context-parallel ranks, which have all computed them, the first one's."""
    logits = output.contiguous() if isinstance(output, Tensor) else torch.empty(shape, device=grid.device)
    for group, source in ((grid.group("cp"), 0), (grid.group("pp"), -1)):
        if group is not None:
            dist.broadcast(logits, group=group, group_src=source % group.size())
    return logits
