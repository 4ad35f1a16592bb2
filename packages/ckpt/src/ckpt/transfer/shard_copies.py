"""Plan copies from the shards of one model to the shards of another one that other processes hold, on any two grids.

A copy goes from one local tensor straight into another one: no whole tensor is made. Each element of a receiver's
tensors comes once, from one rank that holds it; replicas share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import view_of
from ckpt.layout.adapters import HEADS, Change
from ckpt.layout.dtensors import on_this_rank
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Copy, Shape, carried_over, intersect, split_box, volume
from ckpt.layout.place import Place
from ckpt.transfer.agreement import require_same
from ckpt.transfer.holdings import HeldPiece, Holdings, Tensors, take_stock
from ckpt.transfer.receive import required_names
from ckpt.transfer.tied import require_equal_copies


def weights_to_send(
    tensors: Sequence[Tensors],
    layout: Layout,
    group: ProcessGroup | None,
    places: Sequence[Place],
    change: Change | None = None,
) -> Holdings:
    """Return the ranks' tensors, as `plan_copies` needs them; collective over `group`.

    Args:
        tensors: This rank's tensors by local name, one mapping for each chunk; DTensors under FSDP2.
        layout: From `layout_for`.
        group: The ranks that together hold the model; None: this process alone.
        places: The place of each chunk.
        change: Changes the values of every box before they are sent, such as `AdapterLayout.merging`.

    Raises:
        ValueError: As `stream_hf`, on every rank.
    """
    require_same(group, layout=layout.fingerprint)
    holdings = dataclasses.replace(take_stock(tensors, layout, places, group), change=change)
    require_equal_copies(holdings, layout, group)
    return holdings


@dataclass(frozen=True, slots=True)
class TargetShards:
    """The shards of a process that receives weights.

    Attributes:
        chunks: The dtype and the pieces of each local tensor, for each chunk.
        shapes: The shapes of all tensors of the model, by canonical name.
        required: The tensors that must come.
    """

    chunks: list[dict[str, tuple[torch.dtype, Block]]]
    shapes: dict[str, Shape]
    required: frozenset[str]

    @classmethod
    def of_model(cls, layout: Layout, chunks: Sequence[tuple[Place, Tensors]]) -> TargetShards:
        """Return the shards of a model; a copy of another tensor, which the model shares, needs no values."""
        shards: list[dict[str, tuple[torch.dtype, Block]]] = []
        for place, tensors in chunks:
            blocks = layout.at(place)
            shards.append({})
            for name, tensor in tensors.items():
                if any(layout.canonical[source].copy_of is None for source in blocks[name].names):
                    local, box = on_this_rank(name, tensor, blocks[name].shape)
                    shards[-1][name] = local.dtype, blocks[name].part(box)
        shapes = {name: entry.shape for name, entry in layout.canonical.items()}
        return cls(shards, shapes, required_names(layout))


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A box of a local tensor of a sending rank, and the box of a receiver's local tensor that it fills.

    Attributes:
        held: The sending rank, its local tensor, and the first piece of it in the box.
        receiver: The number of the receiver.
        chunk: The receiver's chunk.
        local: The receiver's local tensor.
        copy: Both boxes.
        dtype: The dtype in which the values travel.
    """

    held: HeldPiece
    receiver: int
    chunk: int
    local: str
    copy: Copy
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes that travel."""
        return volume(self.copy.source_range) * self.dtype.itemsize

    def cut(self, most_bytes: int) -> Iterator[ShardCopy]:
        """Yield copies of at most this number of bytes, and at least one element."""
        if self.nbytes <= most_bytes:
            yield self
            return
        for box in split_box(self.copy.source_range, max(1, most_bytes // self.dtype.itemsize)):
            yield dataclasses.replace(self, copy=Copy(box, carried_over(box, self.copy)))

    def read(self, holdings: Holdings, buffer: Tensor) -> None:
        """Write the sending rank's values into a flat buffer of the copy's dtype."""
        holdings.copy_box(self.held.chunk, self.held.local, self.copy.source_range, buffer)

    def target(self, chunks: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the box of a receiver's tensors, a view."""
        return _view(chunks[self.chunk], self.local, self.copy.destination_range)

    def write(self, chunks: Sequence[Mapping[str, Tensor]], values: Tensor, indices: Tensor | None = None) -> None:
        """Write values into a receiver's tensors.

        Args:
            chunks: The receiver's tensors by local name, one mapping for each chunk.
            values: The values of the whole box, or `[n]` of some elements.
            indices: `[n]`, the numbers of these elements in the box, in the order of its values.
        """
        target = self.target(chunks)
        if indices is None:
            target.copy_(values.view(target.shape))
        else:
            target.index_put_(torch.unravel_index(indices.long(), target.shape), values.to(target.dtype))

    def read_received(self, chunks: Sequence[Mapping[str, Tensor]], buffer: Tensor) -> None:
        """Write a receiver's values into a flat buffer, where `held` names a receiver, which sends its values on."""
        view = _view(chunks[self.held.chunk], self.held.local, self.copy.source_range)
        buffer.view(view.shape).copy_(view)


def _view(tensors: Mapping[str, Tensor], name: str, box: Box) -> Tensor:
    local, _ = on_this_rank(name, tensors[name].detach(), tuple(tensors[name].shape))
    return view_of(local, box)


def plan_copies(holdings: Holdings, targets: Sequence[TargetShards]) -> list[ShardCopy]:
    """Return the copies that fill every receiver's tensors, each element once; nothing is communicated.

    A value head stays with the senders. Values travel in the narrower dtype of both sides. Boxes that are neighbours on
    both sides are one copy, such as all experts of a rank.

    Raises:
        ValueError: A sent tensor is not one of the receiver's model, a shape is wrong, a required tensor is missing, or
            as `Holdings.assign_owners`.
    """
    for target in targets[:1]:
        _require_same_model(holdings, target)
    owners = holdings.assign_owners()
    groups: dict[tuple[object, ...], list[ShardCopy]] = {}
    for number, target in enumerate(targets):
        for index, chunk in enumerate(target.chunks):
            for local, (dtype, block) in chunk.items():
                for piece in block.pieces:
                    if piece.is_padding:
                        continue
                    travels = min(holdings.dtypes.get(piece.name, dtype), dtype, key=lambda each: each.itemsize)
                    for held in owners.get(piece.name, ()):
                        if (copy := intersect(held.piece, piece)) is not None:
                            entry = ShardCopy(held, number, index, local, copy, travels)
                            key = number, index, local, held.rank, held.chunk, held.local, travels
                            groups.setdefault(key, []).append(entry)
    return [entry for group in groups.values() for entry in _joined(group)]


def _require_same_model(holdings: Holdings, target: TargetShards) -> None:
    """Refuse tensors that the receivers' model does not have, or has in other shapes, and missing tensors."""
    for name, shape in holdings.shapes.items():
        if name in HEADS:
            continue
        if name not in target.shapes or tuple(target.shapes[name]) != tuple(shape):
            problem = f"has the shape {list(shape)}" if name in target.shapes else "is not a tensor of the model"
            raise ValueError(f"{name} {problem} of the engine; send the weights of the engine's own checkpoint")
    if left := sorted(target.required - holdings.shapes.keys()):
        raise ValueError(f"the sender does not hold {', '.join(left[:3])} ({len(left)} tensors in all)")


def _joined(copies: list[ShardCopy]) -> list[ShardCopy]:
    """Join the copies between two local tensors whose boxes are neighbours on both sides, the last dimension first."""
    dims = len(copies[0].copy.source_range)
    boxes = [entry.copy for entry in copies]
    if dims == len(copies[0].copy.destination_range):
        for dim in reversed(range(dims)):
            boxes = _joined_along(boxes, dim)
    return [dataclasses.replace(entry, copy=box) for entry, box in zip(copies, boxes, strict=False)]


def _joined_along(boxes: Sequence[Copy], dim: int) -> list[Copy]:
    """Join the boxes that differ in one dimension alone, and lie behind each other there on both sides."""
    rows: dict[tuple[object, ...], list[Copy]] = {}
    for box in boxes:
        sides = [side[:dim] + side[dim + 1 :] for side in (box.source_range, box.destination_range)]
        offset = box.destination_range[dim][0] - box.source_range[dim][0]
        rows.setdefault((*sides, offset), []).append(box)
    joined: list[Copy] = []
    for row in rows.values():
        run = 0  # the number of the row's first box in the open run
        row.sort(key=lambda box: box.source_range[dim][0])
        for number, (box, behind) in enumerate(zip_longest(row, row[1:])):
            if behind is None or behind.source_range[dim][0] != box.source_range[dim][1]:
                joined.append(_spanning(row[run], box, dim))
                run = number + 1
    return joined


def _spanning(first: Copy, last: Copy, dim: int) -> Copy:
    sides = [
        (*one[:dim], (one[dim][0], other[dim][1]), *one[dim + 1 :])
        for one, other in (
            (first.source_range, last.source_range),
            (first.destination_range, last.destination_range),
        )
    ]
    return Copy(*sides)
