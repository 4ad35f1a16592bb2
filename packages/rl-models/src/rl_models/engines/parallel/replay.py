"""Router replay on divided micro-batches: split replays over ranks, and gather recordings.

Shape legend: T tokens of a micro-batch, T' this rank's under context parallelism, M layers with routed experts,
k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.context_parallel import gather_sequence
from parallel_layers.moe import RouterReplay
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
    replay: RouterReplay,
    local: RouterReplay,
    decoder: Decoder,
    *,
    layers: Sequence[int],
    shape: tuple[int, int],
    num_tokens: int,
    group: ProcessGroup | None,
    device: torch.device,
) -> None:
    """Put the recordings of all ranks into `replay`, on every rank.

    Args:
        replay: The replay of the whole micro-batch.
        local: The recording of this rank.
        decoder: The decoder, which knows this rank's tokens.
        layers: The M numbers of the layers with routed experts.
        shape: T with the added padding, and k.
        num_tokens: T without the added padding.
        group: The pipeline's stages; None: this rank has all layers.
        device: The device of the routers.

    Communication: an all-gather for each layer over the context-parallel group, and one all-reduce over the pipeline.
    """
    table_MTk = torch.zeros(len(layers), *shape, dtype=torch.int64, device=device)
    for row, layer in enumerate(layers):
        if layer in local.experts:
            whole: Tensor = gather_sequence(local.experts[layer], decoder.context_group, layout=decoder.context_layout)
            table_MTk[row] = whole
    if group is not None:  # each layer is on one stage, and 0 elsewhere
        dist.all_reduce(table_MTk, group=group)
    replay.experts.update(zip(layers, table_MTk[:, :num_tokens].unbind(), strict=True))
