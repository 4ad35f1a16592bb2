"""Router replay on divided micro-batches: split replays over ranks, and gather recordings.

Shape legend: T tokens of a micro-batch, T' this rank's under context parallelism, M layers with routed experts,
k experts a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel_layers.attention.context_parallel import gather_sequence
from parallel_layers.moe import RouterReplay
from rl_models.engines.engine import MicroBatch
from rl_models.grid import Grid
from rl_models.models.decoder import Decoder


def local_replay(replay: RouterReplay, decoder: Decoder, num_tokens: int) -> RouterReplay:
    """Return this rank's part of a replay: `[T', k]` for each layer, with rows of -1 for padding up to `num_tokens`."""
    local = RouterReplay()
    if replay.recording:
        return local
    local.recording = False
    for layer, entry in replay.experts.items():
        padding = entry.new_full((num_tokens - len(entry), entry.shape[1]), -1)
        local.experts[layer] = decoder.split(torch.cat([entry, padding]))
    return local


def complete(
    micro_batch: MicroBatch, local: MicroBatch, decoder: Decoder, grid: Grid, *, top_k: dict[int, int]
) -> None:
    """Put the recordings of all ranks into the replay of `micro_batch`, on every rank.

    `local` is the same micro-batch as this rank's layers took it; `top_k` gives k of each of the M layers.

    Communication: an all-gather for each layer over the context-parallel group, and one all-reduce over the pipeline.
    """
    if micro_batch.replay is None or local.replay is None or not micro_batch.replay.recording:
        return
    shape = len(top_k), local.packed.num_tokens, max(top_k.values())
    table_MTk = torch.zeros(shape, dtype=torch.int64, device=grid.device)
    for row, layer in enumerate(top_k):
        if layer in local.replay.experts:
            experts = local.replay.experts[layer]
            table_MTk[row] = gather_sequence(experts, decoder.context_group, layout=decoder.context_layout)
    if (group := grid.group("pp")) is not None:  # each layer is on one stage, and 0 elsewhere
        dist.all_reduce(table_MTk, group=group)
    whole = table_MTk[:, : micro_batch.packed.num_tokens].unbind()
    micro_batch.replay.experts.update(zip(top_k, whole, strict=True))
