"""The tensors that the files of a checkpoint hold, as pieces of canonical tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckpt.files.boxio import view_of
from ckpt.files.disk import while_unchanged
from ckpt.files.header import Header, TensorInfo
from ckpt.files.tensor_bytes import check_bytes
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Piece, extents, shared
from ckpt.layout.place import Grid
from ckpt.transfer.parallel_reads import Read, read_all

Index = dict[str, list[tuple[str, Piece]]]


@dataclass
class TensorFiles:
    """The tensors that files hold, as pieces of canonical tensors.

    Attributes:
        headers: The header of each file.
        tensors: Key -> (file, where the tensor lies in the file).
        pieces: Canonical name -> [(key, piece)], each element once.
    """

    headers: dict[Path, Header] = field(default_factory=dict)
    tensors: dict[str, tuple[Path, TensorInfo]] = field(default_factory=dict)
    pieces: Index = field(default_factory=dict)

    @property
    def files(self) -> dict[Path, int]:
        """The time of each file's last change (`ckpt.files.disk`)."""
        return {path: header.modified_ns for path, header in self.headers.items()}

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a canonical tensor."""
        return self.tensors[self.pieces[name][0][0]][1].dtype

    def check(self, rank: int = 0, size: int = 1) -> None:
        """Compare the bytes of the files with their recorded checksums; each of `size` ranks compares a share."""
        with while_unchanged(self.files):
            check_bytes(self.headers, rank, size)

    def reads(self, tensor: Tensor, block: Block) -> Iterator[Read]:
        """Clear the padding of a tensor, and yield the reads that fill the rest."""
        for piece in block.pieces:
            if piece.is_padding:
                view_of(tensor, piece.local_range).zero_()
        for key, copy in shared(block, self.pieces):
            path, info = self.tensors[key]
            yield Read(key, path, info, copy.source_range, view_of(tensor, copy.destination_range))

    def values(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a canonical tensor, however the files divide the tensor."""
        values = torch.empty(extents(box), dtype=dtype)
        read_all(self.reads(values, Block(extents(box), (Piece.of_box(name, box),))))
        return values


@dataclass
class Source(TensorFiles):
    """A Hugging Face or a sharded checkpoint.

    Attributes:
        layout: The layout of the model.
        copies: Canonical name -> [(key, piece)], for further copies at other places.
        tied: The canonical tensors that several pipeline chunks hold.
        grid: The grid of a sharded checkpoint; None for Hugging Face.
    """

    layout: Layout = field(kw_only=True)
    copies: Index = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    grid: Grid | None = None

    def dtype(self, names: tuple[str, ...], local: str, cast: torch.dtype | None) -> torch.dtype:
        """Return the dtype of a local tensor that joins canonical tensors: `cast` where they may be cast, or their own.

        Raises:
            ValueError: The tensors have several dtypes and are not cast.
        """
        dtypes = {self.tensors[key][1].dtype for name in names for key, _ in self.pieces[name]}
        kept = any(self.layout.canonical[name].keep_dtype for name in names)
        if cast is not None and not kept and all(dtype.is_floating_point for dtype in dtypes):
            return cast
        if len(dtypes) > 1:
            raise ValueError(
                f"{local} joins tensors of types {sorted(map(str, dtypes))}; pass dtype= to cast them to one, or save "
                "them in one type"
            )
        return dtypes.pop()
