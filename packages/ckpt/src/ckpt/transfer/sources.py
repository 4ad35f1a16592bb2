"""Describe files as pieces of canonical tensors: a Hugging Face checkpoint or a sharded one."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt.files.dtypes import joined_dtype
from ckpt.files.folder import open_checkpoint
from ckpt.files.header import TensorInfo, read_header
from ckpt.files.tensor_bytes import check_bytes
from ckpt.files.unchanged import while_unchanged
from ckpt.layout.families import Role
from ckpt.layout.model_layout import Layout, layout_for
from ckpt.layout.pieces import Box, Piece
from ckpt.layout.place import Grid
from ckpt.transfer.match import detect_role, is_prediction_layer, match
from ckpt.transfer.shards import is_sharded, open_shards
from ckpt.transfer.tied import tied_names

Index = dict[str, list[tuple[str, Piece]]]


@dataclass
class Source:
    """The tensors that files hold, as pieces of canonical tensors.

    Attributes:
        layout: The layout of the model.
        files: The time of each file's last change (`ckpt.files.unchanged`).
        tensors: Key -> (file, where the tensor lies in the file).
        pieces: Canonical name -> [(key, piece)], each element once.
        copies: Canonical name -> [(key, piece)], for further copies at other places.
        tied: The canonical tensors that several pipeline chunks hold.
        grid: The grid of a sharded checkpoint; None for Hugging Face.
    """

    layout: Layout
    files: dict[Path, int]
    tensors: dict[str, tuple[Path, TensorInfo]] = field(default_factory=dict)
    pieces: Index = field(default_factory=dict)
    copies: Index = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    grid: Grid | None = None

    def dtype(self, names: tuple[str, ...], local: str, cast: torch.dtype | None) -> torch.dtype:
        """Return the dtype of a local tensor that joins canonical tensors: `cast` where they may be cast, or their own.

        Raises:
            ValueError: The tensors have several dtypes and are not cast.
        """
        found = {self.tensors[key][1].dtype for name in names for key, _ in self.pieces[name]}
        kept = any(self.layout.canonical[name].keep_dtype for name in names)
        return joined_dtype(local, found, None if kept else cast)


def open_source(path: str | os.PathLike[str], role: Role | None = None, *, check: bool = False) -> Source:
    """Open a Hugging Face folder or a sharded one; without `role`, the heads and the config decide the role.

    With `check`, compare the bytes of the files with their recorded checksums, too.

    Raises:
        ValueError: As `open_checkpoint`, `match`, `open_shards` or `check_bytes`.
    """
    source = _sharded(path) if is_sharded(path) else _hugging_face(path, role)
    if check:
        with while_unchanged(source.files):
            check_bytes({file: read_header(file) for file in source.files})
    return source


def _hugging_face(path: str | os.PathLike[str], role: Role | None) -> Source:
    checkpoint = open_checkpoint(path)
    layout = layout_for(path, role=role or detect_role(checkpoint))
    tensors = {name: (checkpoint.path / file, info) for name, (file, info) in checkpoint.tensors.items()}
    source = Source(layout, checkpoint.files, tensors)
    source.pieces = match(checkpoint, layout)
    return source


def open_with_prediction_layers(path: str | os.PathLike[str], role: Role | None = None) -> Source:
    """Open a source with the tensors of multi-token-prediction layers, which `open_source` omits."""
    source = open_source(path, role)
    infos = {name: info for name, (_, info) in source.tensors.items() if is_prediction_layer(name, source.layout)}
    shapes = {name: info.shape for name, info in infos.items() if info.nbytes}
    source.layout = dataclasses.replace(source.layout, carried={**source.layout.carried, **shapes})
    source.pieces |= {name: [(name, Piece.whole(name, shape))] for name, shape in shapes.items()}
    return source


def _sharded(path: str | os.PathLike[str]) -> Source:
    shards = open_shards(path)
    source = Source(shards.layout, shards.files, tied=tied_names(shards.layout, shards.grid.places()), grid=shards.grid)
    boxes: dict[str, set[Box]] = {}
    for index, place in enumerate(shards.grid.places()):
        blocks = shards.layout.at(place)
        for local, info in shards.tensors(index).items():
            key = f"{index}:{local}"
            source.tensors[key] = (shards.file(index), info)
            for piece in blocks[local].pieces:
                if piece.canonical_range is not None:
                    seen = boxes.setdefault(piece.name, set())
                    held = source.copies if piece.canonical_range in seen else source.pieces
                    held.setdefault(piece.name, []).append((key, piece))
                    seen.add(piece.canonical_range)
    return source
