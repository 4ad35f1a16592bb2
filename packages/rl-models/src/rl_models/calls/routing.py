"""Router replay: the routing of a batch for the micro-batches of an engine, and back.

Shape legend: T tokens, M layers with routed experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers import PackedSequence
from parallel_layers.moe import RouterReplay
from parallel_models import Engine
from rl_models.batch.batch import Batch

# The field of a batch.
ROUTING = "routing"


def require_routing(engine: Engine, batch: Batch, *, record: bool = False) -> None:
    """Raise ValueError unless an engine can record the routing of a batch, or replay the batch's own."""
    has_field = ROUTING in batch.fields
    if not has_field and not record:
        return
    if has_field and record:
        raise ValueError(f"record_routing=True for a batch that has the field {ROUTING!r}; leave one of them out")
    if not engine.routed_layers:
        raise ValueError("the model has no mixture of experts, so there is no routing to record or replay")
    if has_field:
        table_TMk = batch[ROUTING]
        if table_TMk.dim() != 3 or table_TMk.shape[1] != len(engine.routed_layers) or table_TMk.is_floating_point():
            raise ValueError(
                f"{ROUTING} must be [T, {len(engine.routed_layers)}, k] integers for the layers "
                f"{list(engine.routed_layers)}, got {list(table_TMk.shape)} {table_TMk.dtype}"
            )
        RouterReplay.from_tensor(table_TMk.long(), engine.routed_layers, num_experts=engine.num_experts)


def replays(
    batch: Batch, positions: Sequence[Tensor], packs: Sequence[PackedSequence], engine: Engine
) -> list[RouterReplay]:
    """Return the replay of each micro-batch, from the field of a batch that has passed `require_routing`.

    `positions` says where in the batch the tokens of each micro-batch stand. The routers choose for padding.
    """
    table_TMk, micro_batch_replays = batch[ROUTING].long(), []
    for indices, packed in zip(positions, packs, strict=True):
        padding = (0, 0, 0, 0, 0, packed.num_tokens - len(indices))
        layers_MTk = F.pad(table_TMk[indices], padding, value=-1).unbind(1)
        recording = RouterReplay()
        recording.experts.update(zip(engine.routed_layers, layers_MTk, strict=True))
        micro_batch_replays.append(recording.replaying())
    return micro_batch_replays


def recorded(tables: Sequence[RouterReplay | None], positions: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Return `[T, M, k]` int16 from the micro-batches' recordings."""
    recordings = [replay.as_tensor().to(torch.int16) for replay in tables if replay is not None]
    routing = recordings[0].new_full((num_tokens, *recordings[0].shape[1:]), -1)
    for table, indices in zip(recordings, positions, strict=True):
        routing[indices] = table[: len(indices)]
    return routing
