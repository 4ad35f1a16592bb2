"""Relays: each rank of the actor sends a box once, and the engines send it on, in rounds of bounded size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt.transfer import ShardCopy
from rl_train.weight_sync.shard_exchange import ShardPlan, _Part, plans_of

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Held:
    """The place of a copy's values on its sender."""

    rank: int
    chunk: int
    local: str


@dataclass(frozen=True)
class Boxes:
    source_range: Box
    destination_range: Box


# Rows of each tensor, of 8 columns.
SIZES = {"a": 20, "b": 7, "c": 1, "d": 31}


def copies_of(senders: int, engines: int, ranks: int) -> list[ShardCopy]:
    """Return the copies of tensors whose rows `senders` and the `ranks` of each engine share; all ranks need "c"."""
    copies = []
    for name, rows in SIZES.items():
        sent = [(rank * rows // senders, (rank + 1) * rows // senders) for rank in range(senders)]
        for engine in range(engines):
            for rank in range(ranks):
                low, high = (0, rows) if name == "c" else (rank * rows // ranks, (rank + 1) * rows // ranks)
                for sender, (start, stop) in enumerate(sent):
                    first, last = max(start, low), min(stop, high)
                    if first < last:
                        held: Any = Held(sender, 0, name)
                        boxes: Any = Boxes(
                            ((first - start, last - start), (0, 8)),
                            ((first - low, last - low), (0, 8)),
                        )
                        copies.append(ShardCopy(held, engine * ranks + rank, 0, name, boxes, torch.float32))
    return copies


def carry_out(plans: list[ShardPlan], copies: list[ShardCopy], senders: int) -> list[dict[str, Tensor]]:
    """Carry out plans as `exchange_shards` does: a round is packed before the one before is in the parameters."""
    held: list[dict[str, Tensor]] = [{} for _ in plans]
    for copy in copies:
        for rank, name, box in (
            (copy.held.rank, copy.held.local, copy.copy.source_range),
            (senders + copy.receiver, copy.local, copy.copy.destination_range),
        ):
            rows = max(box[0][1], len(held[rank].get(name, ())))
            held[rank][name] = torch.full((rows, 8), torch.nan)
    for rank in range(senders):
        for name, tensor in held[rank].items():
            first = rank * SIZES[name] // senders * 8
            held[rank][name] = torch.arange(first, first + tensor.numel()).view(-1, 8).float()
    pending: list[tuple[ShardCopy, Tensor]] = []
    for number in range(len(plans[0].rounds) + 1):
        sent = []
        for rank, plan in enumerate(plans):
            for copy in plan.rounds[number] if number < len(plan.rounds) else ():
                if copy.held.rank == rank:
                    buffer = torch.empty(copy.nbytes // 4)
                    copy.read_received([held[rank]], buffer)
                    sent.append((copy, buffer))
        for copy, buffer in pending:
            copy.write([held[senders + copy.receiver]], buffer)
        pending = sent
    return held


@pytest.mark.parametrize(
    ("senders", "engines", "ranks", "relayed"),
    [(1, 4, 1, True), (2, 4, 1, True), (1, 3, 2, True), (2, 2, 2, True), (3, 2, 1, False), (1, 1, 1, False)],
)
@pytest.mark.parametrize("most_bytes", [200, 1000, 30_000])
def test_each_box_is_sent_once_and_arrives_everywhere(
    senders: int, engines: int, ranks: int, relayed: bool, most_bytes: int
) -> None:
    copies = copies_of(senders, engines, ranks)
    random.Random(0).shuffle(copies)
    plans = plans_of(copies, senders, engines * ranks, most_bytes, check=True)
    held = carry_out(plans, copies, senders)
    for engine in range(engines):
        parts = held[senders + engine * ranks :][:ranks]
        for name, rows in SIZES.items():
            values = parts[0][name] if name == "c" else torch.cat([part[name] for part in parts if name in part])
            assert torch.equal(values, torch.arange(rows * 8).view(rows, 8).float()), name
    total = sum(SIZES.values()) * 8 * 4
    sent = [0] * len(plans)
    for rank, plan in enumerate(plans):
        for part in plan.rounds:
            for sends in (True, False):
                sizes = [c.nbytes for c in part if (c.held.rank if sends else senders + c.receiver) == rank]
                sent[rank] += sum(sizes) * sends
                assert sum(sizes) <= most_bytes or len(sizes) == len({(c.held.rank, c.receiver) for c in part})
    assert sum(sent[:senders]) == total * (1 if relayed else engines)
    if relayed and ranks == 1 and most_bytes < 30_000:
        assert max(sent[senders:]) <= 1.2 * min(sent[senders:])
    assert any(sent[senders:]) == relayed


def test_a_flipped_bit_of_a_round_is_seen() -> None:
    plan = plans_of(copies_of(1, 1, 1), 1, 1, 30_000, check=True)[0]
    peers: list[Any] = [SimpleNamespace(rendezvous=SimpleNamespace(rank=rank, size=2)) for rank in range(2)]
    sent, received = (_Part.of_round(peer, plan.rounds[0], peer is peers[0], plan) for peer in peers)
    data = torch.zeros(sent.length, dtype=torch.uint8)
    sent.pack(data, lambda copy, values: values.fill_(1.5))
    arrived = list[Tensor]()
    received.unpack(data, lambda copy, values: arrived.append(values))
    assert sum(map(len, arrived)) == sum(SIZES.values()) * 8
    data[len(data) // 2] ^= 1
    with pytest.raises(ValueError, match="arrived with other bits than were sent: the checksum of their round differs"):
        received.unpack(data, lambda copy, values: None)
