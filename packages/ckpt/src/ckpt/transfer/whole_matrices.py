"""`WholeMatrices`: functions of whole Hugging Face matrices whose parts lie on many ranks, a matrix a rank at a time.

Each matrix has an owner among the ranks that hold a part of it, chosen once so that all ranks compute equally much. In
a round every rank gathers some of its matrices, at most the elements of the largest matrix, computes, and sends the
results back to the ranks that hold the parts. A matrix that lies whole on its only rank does not travel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import view_of
from ckpt.layout.dtensors import on_this_rank
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Box, Piece, Shape, extents, intersect, relative
from ckpt.layout.place import Place
from ckpt.transfer.agreement import all_gather_json
from ckpt.transfer.exchange import Bucket, WantedPiece, exchange, plan_moves
from ckpt.transfer.holdings import Chunk, HeldPiece, LocalParts, take_stock

# Matrices `[N, n, m]`, which may be overwritten -> the results.
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix: a canonical tensor, or one entry of a stack of experts."""

    name: str
    box: Box

    @property
    def shape(self) -> Shape:
        """Return (rows, columns)."""
        return extents(self.box)[-2:]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape[0] * self.shape[1]

    @property
    def piece(self) -> Piece:
        """Return the whole matrix as a piece, with local coordinates from 0."""
        return Piece(self.name, self.box, relative(self.box, self.box)[-2:])


@dataclass(frozen=True)
class _Round:
    """The matrices of this rank in a round, all of one shape, and the exchanges that bring them and their results."""

    matrices: Sequence[Matrix]
    gather: Sequence[Bucket]
    scatter: Sequence[Bucket]


class WholeMatrices:
    """Some matrices of a model, whose parts the ranks of a group hold; every rank makes this.

    Args:
        chunks: The place of each pipeline chunk of this rank, and its tensors by local name.
        layout: The layout of the tensors.
        group: The ranks that hold the whole model; None: this rank alone.
        is_chosen: Whether to include a canonical tensor, a matrix or a stack of matrices, by its name and shape.

    Attributes:
        parameters: The tensors of this rank that consist of parts of the matrices, without frozen tensors.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[Place, Mapping[str, Tensor]]],
        layout: Layout,
        group: ProcessGroup | None,
        is_chosen: Callable[[str, Shape], bool],
    ) -> None:
        self.group = group
        holdings = take_stock([tensors for _, tensors in chunks], layout, [place for place, _ in chunks], group)
        trained = {
            name
            for place, tensors in chunks
            for local, tensor in tensors.items()
            if tensor.requires_grad
            for name in layout.at(place)[local].names
        }
        everywhere = set(itertools.chain(*all_gather_json(sorted(trained), group)))
        chosen = {
            name: shape for name, shape in holdings.shapes.items() if name in everywhere and is_chosen(name, shape)
        }
        # A local tensor is changed by one algorithm.
        blocks = [block for held in holdings.ranks for chunk in held for block in chunk.blocks.values()]
        mixed = {name for block in blocks for name in block.names if not chosen.keys() >= set(block.names)}
        self._shapes = {name: shape for name, shape in chosen.items() if name not in mixed}
        self._locals: list[dict[str, Tensor]] = [
            {
                local: tensor
                for local, tensor in tensors.items()
                if tensor.requires_grad and set(layout.at(place)[local].names) <= self._shapes.keys()
            }
            for place, tensors in chunks
        ]
        self.parameters = [tensor for tensors in self._locals for tensor in tensors.values()]
        self._boxes = [
            {local: on_this_rank(local, tensor, layout.at(place)[local].shape)[1] for local, tensor in tensors.items()}
            for (place, _), tensors in zip(chunks, self._locals, strict=True)
        ]
        self._holdings = holdings
        self._rounds = list(self._plan())

    def _plan(self) -> Iterator[_Round]:
        holdings, rank, shapes = self._holdings, self._holdings.rank, self._shapes
        holders: dict[str, list[HeldPiece]] = {name: [] for name in shapes}
        for held in holdings.pieces():
            if held.piece.name in shapes:
                holders[held.piece.name].append(held)
        once = holdings.assign_owners()
        load = [0] * len(holdings.ranks)
        queues: list[list[Matrix]] = [[] for _ in holdings.ranks]
        matrices = [matrix for name, shape in shapes.items() for matrix in _matrices(name, shape)]
        matrices.sort(key=lambda matrix: (-matrix.numel, matrix.shape))
        parts = {matrix: [held for held in holders[matrix.name] if _meets(held, matrix)] for matrix in matrices}
        for matrix in matrices:
            owner = min((held.rank for held in parts[matrix]), key=lambda number: (load[number], number))
            load[owner] += matrix.numel * min(matrix.shape)
            queues[owner].append(matrix)
        most = max((matrix.numel for matrix in matrices), default=0)
        for batches in itertools.zip_longest(*(self._batches(queue, most) for queue in queues), fillvalue=()):
            gather, scatter = [], []
            for owner, batch in enumerate(batches):
                for number, matrix in enumerate(batch):
                    owned = [held for held in once[matrix.name] if _meets(held, matrix)]
                    gather.append((owned, WantedPiece(frozenset((owner,)), str(number), matrix.piece)))
                    result = [HeldPiece(owner, 0, str(number), matrix.piece)]
                    scatter += [
                        (result, WantedPiece(frozenset((held.rank,)), f"{held.chunk}/{held.local}", held.piece))
                        for held in parts[matrix]
                    ]
            yield _Round(batches[rank], list(plan_moves(holdings, gather)), list(plan_moves(holdings, scatter)))

    def _batches(self, queue: Sequence[Matrix], most: int) -> Iterator[Sequence[Matrix]]:
        """Cut a rank's matrices into runs of one shape and dtype with at most `most` elements in all."""
        dtypes = self._holdings.dtypes
        for _, alike in itertools.groupby(queue, key=lambda matrix: (matrix.shape, dtypes[matrix.name])):
            run = list(alike)
            count = max(1, most // run[0].numel)
            yield from (run[first : first + count] for first in range(0, len(run), count))

    def apply_(self, tensors: Mapping[Tensor, Tensor], function: Function, factor: Callable[[Shape], float]) -> None:
        """Replace each matrix by a function of it, times a factor of its shape.

        Every rank calls this. `tensors` has the values of this rank's part for each of `parameters`; a matrix is
        gathered, computed and sent in the dtype of its parameter.
        """
        holdings = self._holdings
        parts: LocalParts = [
            (chunk.place, {local: (tensors[tensor], boxes[local]) for local, tensor in local_tensors.items()})
            for chunk, local_tensors, boxes in zip(holdings.chunks, self._locals, self._boxes, strict=True)
        ]
        holdings = holdings.with_tensors(parts)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        for round_ in self._rounds:
            whole = torch.empty(0)
            if round_.matrices:
                dtype = holdings.dtypes[round_.matrices[0].name]
                whole = torch.empty(len(round_.matrices), *round_.matrices[0].shape, dtype=dtype, device=device)

            def gather(want: WantedPiece, box: Box, values: Tensor, whole: Tensor = whole) -> None:
                view = view_of(whole[int(want.tensor)], box)
                view.copy_(values.reshape(view.shape))

            for _ in exchange(holdings, round_.gather, self.group, gather):
                pass
            if round_.matrices:
                whole = function(whole)
            results = {str(number): whole[number] for number in range(len(round_.matrices))}
            ranks: list[list[Chunk]] = [[] for _ in holdings.ranks]
            ranks[holdings.rank] = [Chunk(Place(), {}, results)]
            sender = dataclasses.replace(holdings, ranks=ranks)

            def scatter(want: WantedPiece, box: Box, values: Tensor) -> None:
                chunk, _, local = want.tensor.partition("/")
                view = view_of(holdings.chunks[int(chunk)].tensors[local], box)
                view.copy_(values.reshape(view.shape)).mul_(factor(self._shapes[want.piece.name][-2:]))

            for _ in exchange(sender, round_.scatter, self.group, scatter):
                pass


def _matrices(name: str, shape: Shape) -> Iterator[Matrix]:
    """Yield the matrices of a canonical tensor."""
    sides = tuple((0, size) for size in shape[-2:])
    if len(shape) == 2:
        yield Matrix(name, sides)
    else:
        yield from (Matrix(name, ((index, index + 1), *sides)) for index in range(shape[0]))


def _meets(held: HeldPiece, matrix: Matrix) -> bool:
    return intersect(held.piece, matrix.piece) is not None
