"""Router replay: the routing of a batch, in the batch's order, to and from the micro-batches of an engine.

Shape legend: T tokens, M layers with routed experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ckpt import agree
from parallel_layers import PackedSequence
from parallel_layers.moe import RouterReplay
from rl_models.batch import Batch
from rl_models.engines.engine import Engine, RoutedEngine

# The field of a batch.
ROUTING = "routing"


@contextmanager
def routed(
    engine: Engine, parts: Sequence[Batch], packed: Sequence[PackedSequence], *, record: bool = False
) -> Iterator[Sequence[RouterReplay]]:
    """Inside, the engine records the routing of its next call, or replays that of the parts' field.

    Raises:
        ValueError: the engine or its model has no routing, the field does not fit the model, or a batch with the field
            is to be recorded.
    """
    given = ROUTING in parts[0].fields
    if not given and not record:
        yield []
        return
    if given and record:
        raise ValueError(f"record_routing=True for a batch that has the field {ROUTING!r}; leave one of them out")
    if not isinstance(engine, RoutedEngine):
        raise ValueError(f"{type(engine).__name__} does not record or replay routing; choose another backend")
    if not engine.routed_layers:
        raise ValueError("the model has no mixture of experts, so there is no routing to record or replay")
    able = engine

    def make() -> list[RouterReplay]:
        return [RouterReplay() if record else _replay(able, part, p) for part, p in zip(parts, packed, strict=True)]

    # Data-parallel ranks have each their own sequences: a mistake in one's must not leave the others waiting.
    replays = agree(make, engine.grid.everyone)
    with engine.routing(replays):
        yield replays


def _replay(engine: RoutedEngine, part: Batch, packed: PackedSequence) -> RouterReplay:
    table_TMk = part[ROUTING]
    if table_TMk.dim() != 3 or table_TMk.shape[1] != len(engine.routed_layers) or table_TMk.is_floating_point():
        raise ValueError(
            f"{ROUTING} must be [T, {len(engine.routed_layers)}, k] integers for the layers "
            f"{list(engine.routed_layers)}, got {list(table_TMk.shape)} {table_TMk.dtype}"
        )
    padding = table_TMk.new_full((packed.num_tokens - len(table_TMk), *table_TMk.shape[1:]), -1)
    whole = torch.cat([table_TMk, padding]).long()
    return RouterReplay.from_tensor(whole, engine.routed_layers, num_experts=engine.num_experts)


def recorded(
    replays: Sequence[RouterReplay], parts: Sequence[Batch], positions: Sequence[Tensor], num_tokens: int
) -> Tensor:
    """`[T, M, k]` int16 from the micro-batches' recordings; `positions` of their tokens, none for an empty one."""
    tables = [
        replay.as_tensor()[: part.num_tokens].to(torch.int16) for replay, part in zip(replays, parts, strict=True)
    ]
    whole = tables[0].new_full((num_tokens, *tables[0].shape[1:]), -1)
    for table, where in zip(tables, positions, strict=True):
        if len(where):
            whole[where] = table
    return whole
