"""Carry what changed in the shards since the last weight sync: values, and their places in the boxes.

A rank of the actor compares each box with the values that it sent last, which it keeps in host memory. For each round
the peers first exchange the number of changed values in each box, and then the places in 4 bytes each and the values. A
box is sent whole where that is fewer bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt.transfer import ShardCopy
from parallel_layers.device import on_gpu
from rl_models.calls import checksum
from rl_train.weight_sync.buckets import aligned
from rl_train.weight_sync.shard_exchange import Round, ShardPlan, by_peer, carry_rounds, device_of
from rl_train.weight_sync.transport import Broken, Peer

# Floats of equal bits are equal: a NaN, and zeros of both signs.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE = -1
_NUMBERS = 2  # of a box: the number of its changed values, and a checksum


class Change(NamedTuple):
    """The values `[n]` of a box that changed, and their places `[n]` int32 in it; without places the whole box.

    `checksum` is the one of the box after the change.
    """

    places: Tensor | None
    values: Tensor
    checksum: Tensor

    @property
    def number(self) -> int:
        """The number of changed values, or `_WHOLE`."""
        return _WHOLE if self.places is None else len(self.places)


class SentValues:
    """The values of a rank's boxes in the last weight sync, in (page-locked) host memory.

    Boxes that several receivers need are compared once.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._uses = Counter(_source(copy) for copies in plan.rounds for copy in copies)
        self._values: dict[object, Tensor] = {}
        self._changes: dict[object, tuple[int, Change]] = {}

    def keep(self, copy: ShardCopy, values: Tensor) -> None:
        """Keep the values of a box that is sent whole."""
        source = _source(copy)
        if source not in self._values:
            self._values[source] = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu(values))
            self._values[source].copy_(values, non_blocking=True)

    def change(self, copy: ShardCopy, read: Callable[[], Tensor], check: bool) -> Change:
        """Return the change of a box, whose values `read` returns, since it was kept or compared last."""
        source = _source(copy)
        left, change = self._changes.pop(source, (self._uses[source], None))
        if change is None:
            values = read()
            stated = checksum(values) if check else torch.zeros((), dtype=torch.int64, device=values.device)
            change = Change(*changes_since(self._values[source], values), stated)
        if left > 1:
            self._changes[source] = left - 1, change
        return change


def changes_since(last: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the places `[n]` int32 and the values `[n]` of what changed, and write it to `last`.

    Args:
        last: `[size]`, the former values, in host memory.
        values: `[size]`, on any device.

    Returns:
        None and all values, where that is fewer bytes.
    """
    bits = _BITS[values.element_size()]
    places = (values.view(bits) != last.to(values.device, non_blocking=True).view(bits)).nonzero()[:, 0].int()
    last.copy_(values, non_blocking=True)
    if places.nbytes + len(places) * values.element_size() >= values.nbytes:
        return None, values
    return places, values[places]


def _source(copy: ShardCopy) -> object:
    """Return what several copies of the same values have in common."""
    return copy.held.chunk, copy.held.local, copy.held.piece, copy.copy.source_range, copy.dtype


def send_changes(
    peer: Peer,
    plan: ShardPlan,
    sent: SentValues,
    read: Callable[[ShardCopy, Tensor], None],
    broken: Broken = lambda: False,
) -> int:
    """Send what changed, and return the number of bytes; see `exchange_shards`."""
    sizes = list[int]()
    carry_rounds(peer, _sent_rounds(peer, plan, sent, read, broken, sizes), broken)
    return sum(sizes)


def receive_changes(peer: Peer, plan: ShardPlan, chunks: Sequence[Mapping[str, Tensor]]) -> None:
    """Write what changed into parameters; see `exchange_shards`.

    Raises:
        ValueError: With checksums, a box has other bits than on the rank that sent it.
    """
    carry_rounds(peer, _received_rounds(peer, plan, chunks), lambda: False)


def _sent_rounds(
    peer: Peer,
    plan: ShardPlan,
    sent: SentValues,
    read: Callable[[ShardCopy, Tensor], None],
    broken: Broken,
    sizes: list[int],
) -> Iterator[Round]:
    device = device_of(peer)

    def values(copy: ShardCopy) -> Tensor:
        buffer = torch.empty(copy.nbytes, dtype=torch.uint8, device=device).view(copy.dtype)
        read(copy, buffer)
        return buffer

    for copies in plan.rounds:
        ordered = by_peer(peer, copies, True, plan)
        changes = [sent.change(copy, partial(values, copy), plan.check) for _, copy in ordered]
        counts = [change.number for change in changes]
        numbers = torch.empty(len(changes), _NUMBERS, dtype=torch.int64, device=device)
        if changes:
            numbers[:, 0] = torch.tensor(counts, device=device)
            numbers[:, 1] = torch.stack([change.checksum for change in changes])
        head = _numbers_round(peer, ordered, numbers, sends=True)
        peer.wait(head.begin(peer, broken), broken)
        layout = _Layout.of(peer, ordered, counts)
        data = torch.empty(sum(layout.sizes), dtype=torch.uint8, device=device)
        for (places, box), change in zip(layout.parts(data), changes, strict=True):
            if places is not None and change.places is not None:
                places.copy_(change.places)
            box.copy_(change.values)
        sizes += [numbers.nbytes, data.nbytes]
        yield Round.one_way(data, layout.sizes, sends=True)


def _received_rounds(peer: Peer, plan: ShardPlan, chunks: Sequence[Mapping[str, Tensor]]) -> Iterator[Round]:
    device = device_of(peer)
    for copies in plan.rounds:
        ordered = by_peer(peer, copies, False, plan)
        numbers = torch.empty(len(ordered), _NUMBERS, dtype=torch.int64, device=device)
        peer.wait(_numbers_round(peer, ordered, numbers, sends=False).begin(peer, lambda: False))
        counts, checksums = numbers.T.tolist()
        layout = _Layout.of(peer, ordered, counts)
        data = torch.empty(sum(layout.sizes), dtype=torch.uint8, device=device)
        finish = partial(_write, layout, data, chunks, checksums if plan.check else None)
        yield Round.one_way(data, layout.sizes, False, finish)


def _numbers_round(peer: Peer, ordered: list[tuple[int, ShardCopy]], numbers: Tensor, *, sends: bool) -> Round:
    boxes = Counter(other for other, _ in ordered)
    row = _NUMBERS * numbers.element_size()
    sizes = [boxes[other] * row for other in range(peer.rendezvous.size)]
    return Round.one_way(numbers.view(torch.uint8).view(-1), sizes, sends)


class _Layout(NamedTuple):
    """The boxes of a round with their numbers of changed values, and the bytes for each peer."""

    copies: list[ShardCopy]
    counts: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, peer: Peer, ordered: list[tuple[int, ShardCopy]], counts: list[int]) -> _Layout:
        sizes = [0] * peer.rendezvous.size
        for (other, copy), count in zip(ordered, counts, strict=True):
            sizes[other] += sum(map(aligned, _part_bytes(copy, count)))
        return cls([copy for _, copy in ordered], counts, sizes)

    def parts(self, data: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
        """Yield the places and the values of each box in the bytes of the round."""
        begin = 0
        for copy, count in zip(self.copies, self.counts, strict=True):
            place_bytes, value_bytes = _part_bytes(copy, count)
            places = data[begin : begin + place_bytes].view(torch.int32)
            begin += aligned(place_bytes)
            yield None if count == _WHOLE else places, data[begin : begin + value_bytes].view(copy.dtype)
            begin += aligned(value_bytes)


def _part_bytes(copy: ShardCopy, count: int) -> tuple[int, int]:
    """Return the bytes of the places and of the values of a box."""
    return (0, copy.nbytes) if count == _WHOLE else (4 * count, count * copy.dtype.itemsize)


def _write(
    layout: _Layout, data: Tensor, chunks: Sequence[Mapping[str, Tensor]], checksums: Sequence[int] | None
) -> None:
    for number, (copy, (places, values)) in enumerate(zip(layout.copies, layout.parts(data), strict=True)):
        copy.write(chunks, values, places)
        if checksums is not None and int(checksum(copy.target(chunks).to(copy.dtype))) != checksums[number]:
            raise ValueError(f"{copy.local} has other bits than at the sender after a weight sync of changed values")
