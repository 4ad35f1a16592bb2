"""Router replay: the routing of a batch, in the batch's order, to and from the micro-batches of an engine.

Shape legend: T tokens, M layers with routed experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel_layers.moe import RouterReplay
from rl_models.batch import Batch
from rl_models.engines.engine import Engine, RoutedEngine
from rl_models.workers.division import Division

# The field of a batch.
ROUTING = "routing"


def require_routing(engine: Engine, batch: Batch, *, record: bool = False) -> None:
    """Check that an engine can record the routing of a batch, or replay the batch's own.

    Raises:
        ValueError: The engine or its model has no routing, the field does not fit the model, or a batch with the field
            is to be recorded.
    """
    given = ROUTING in batch.fields
    if not given and not record:
        return
    if given and record:
        raise ValueError(f"record_routing=True for a batch that has the field {ROUTING!r}; leave one of them out")
    if not isinstance(engine, RoutedEngine):
        raise ValueError(f"{type(engine).__name__} does not record or replay routing; choose another backend")
    if not engine.routed_layers:
        raise ValueError("the model has no mixture of experts, so there is no routing to record or replay")
    if given:
        table_TMk = batch[ROUTING]
        if table_TMk.dim() != 3 or table_TMk.shape[1] != len(engine.routed_layers) or table_TMk.is_floating_point():
            raise ValueError(
                f"{ROUTING} must be [T, {len(engine.routed_layers)}, k] integers for the layers "
                f"{list(engine.routed_layers)}, got {list(table_TMk.shape)} {table_TMk.dtype}"
            )
        RouterReplay.from_tensor(table_TMk.long(), engine.routed_layers, num_experts=engine.num_experts)


@contextmanager
def routed(
    engine: Engine, batch: Batch, division: Division, *, record: bool = False
) -> Iterator[Sequence[RouterReplay]]:
    """Inside, the engine records the routing of its next call, or replays the field of a batch.

    The batch has passed `require_routing`.
    """
    if ROUTING not in batch.fields and not record:
        yield []
        return
    assert isinstance(engine, RoutedEngine)
    replays = [RouterReplay() for _ in division.packed]
    if not record:
        table_TMk = batch[ROUTING].long()
        for replay, where, packed in zip(replays, division.positions, division.packed, strict=True):
            padding = table_TMk.new_full((packed.num_tokens - len(where), *table_TMk.shape[1:]), -1)
            layers_MTk = torch.cat([table_TMk[where], padding]).unbind(1)
            replay.recording = False
            replay.experts.update(zip(engine.routed_layers, layers_MTk, strict=True))
    with engine.routing(replays):
        yield replays


def recorded(replays: Sequence[RouterReplay], division: Division, num_tokens: int) -> Tensor:
    """Return `[T, M, k]` int16 from the micro-batches' recordings."""
    tables = [replay.as_tensor().to(torch.int16) for replay in replays]
    whole = tables[0].new_full((num_tokens, *tables[0].shape[1:]), -1)
    for table, where in zip(tables, division.positions, strict=True):
        whole[where] = table[: len(where)]
    return whole
