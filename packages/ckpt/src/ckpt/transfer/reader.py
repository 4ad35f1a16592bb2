"""Read boxes of canonical tensors from the files of a source, however the files divide them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ckpt.files.boxio import Staging, read_box, view_of
from ckpt.layout.pieces import Block, Box, Piece, extents, full_box, shared
from ckpt.transfer.sources import Source

_MOST_FILES = 128  # open at a time


class Reader:
    """Reads through files that stay open; a context manager that closes them."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._values, self._staging = (Staging(), Staging()), Staging()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(
        self,
        source: Source,
        name: str,
        box: Box,
        dtype: torch.dtype,
        parts: Sequence[tuple[str, Piece]] | None = None,
        buffer: int = 0,
    ) -> Tensor:
        """Return a box of a canonical tensor; valid until the next call with this buffer, 0 or 1.

        `parts` are the source's tensors that hold the box (default: `source.pieces`).
        """
        wanted = Block(extents(box), (Piece(name, box, full_box(extents(box))),))
        values = self._values[buffer].view(wanted.shape, dtype)
        for key, copy in shared(wanted, {name: list(source.pieces[name] if parts is None else parts)}):
            path, info = source.tensors[key]
            if path not in self._fds:
                if len(self._fds) >= _MOST_FILES:
                    self.__exit__()
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            view = view_of(values, copy.destination_range)
            read_box(self._fds[path], info, copy.source_range, view, self._staging, name)
        return values
