"""Convert files to files, from any grid to any other, through a bounded buffer and without a process group."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt.comparison.compare import refuse_differing_copies
from ckpt.files.atomic import FolderWriter
from ckpt.files.boxio import IOCounter, StagingPool, read_box, write_box
from ckpt.files.contents import CONFIG, LAYOUT
from ckpt.files.disk import room_for
from ckpt.files.dtypes import check_cast, refuse_overflow
from ckpt.files.header import TensorInfo
from ckpt.files.unchanged import while_unchanged
from ckpt.files.written_files import FilePlan, copy_companions, create_files, plan_files, write_companions, write_json
from ckpt.layout.families import Role, Target
from ckpt.layout.pieces import Block, Copy, Shape, carried_over, extents, shared, volume
from ckpt.layout.place import Grid, LayerPlacement
from ckpt.transfer.shards import layout_json, shard_name
from ckpt.transfer.sources import Source, open_source

Progress = Callable[[int, int], None]
_CPU = torch.device("cpu")


def reshard(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    grid: Grid,
    *,
    target: Target | None = None,
    layers: LayerPlacement = None,
    vocab_multiple: int = 1,
    role: Role | None = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a sharded checkpoint for a grid from a Hugging Face or a sharded one, bitwise equal; atomically.

    The source's tokenizer, processor and generation files are copied. Memory: two buffers of 16 MiB for any model.

    Args:
        source: A Hugging Face folder, a sharded one, or a file of weights.
        destination: The folder to write. An existing checkpoint is replaced; a folder with other files is refused.
        grid: The grid to write for.
        target: The target of the local tensors; None: the source's ("parallel" for Hugging Face).
        layers: As in `layout_for`.
        vocab_multiple: As in `layout_for`.
        role: The role of a Hugging Face source; None: the role that its heads and config show.
        dtype: Cast floating-point weights.
        check: Compare the source's bytes with its recorded checksums first, which reads all files once more.
        progress: Called with bytes done and bytes in all.

    Raises:
        ValueError: The source is broken, damaged or was replaced meanwhile, the copies of a tied embedding in it
            differ, or the model does not fit the grid; or the destination is the source's own folder.
        OSError: The disk is full; what was at `destination` is intact.
    """
    check_cast(dtype)
    origin, out = _folders(source, destination)
    opened = open_source(source, role, check=check)
    refuse_differing_copies(opened)
    layout = dataclasses.replace(
        opened.layout, target=target or opened.layout.target, layers=layers, vocab_multiple=vocab_multiple
    )
    places = list(grid.places())
    contents = [_contents(opened, layout.at(place), dtype) for place in places]
    entries = [entry for held in contents for entry in held.values()]
    needed = sum(entry.nbytes for entry in entries)
    with room_for(needed, out.parent), FolderWriter(out) as folder, while_unchanged(opened.files):
        filler = _Filler(opened, folder, progress, sum(entry.filled_bytes for entry in entries))
        for index, held in enumerate(contents):
            file = shard_name(index, len(places))
            plan = FilePlan({file: {key: (entry.dtype, entry.shape) for key, entry in held.items()}}, {})
            filler.fill(plan, held)
        copy_companions(origin, folder)
        write_json(folder / CONFIG, layout.config)
        write_json(folder / LAYOUT, layout_json(layout, grid))
        open_source(folder)


def merge(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    copy_from: str | os.PathLike[str] | None = None,
    check: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a Hugging Face checkpoint from a sharded or a Hugging Face one, in other files or another dtype.

    The folder appears at once; memory is bounded by two buffers of 16 MiB.

    Args:
        source: A sharded checkpoint, or a Hugging Face folder.
        destination: The folder to write. An existing checkpoint is replaced; a folder with other files is refused.
        dtype: Cast floating-point weights.
        max_shard_size: As in `save_hf`.
        copy_from: A folder whose tokenizer, processor and generation files are copied; None: the source.
        check: Compare the source's bytes with its recorded checksums first, which reads all files once more.
        progress: Called with bytes done and bytes in all.

    Raises:
        ValueError: The source is broken, damaged or was replaced meanwhile, or the copies of a tied embedding in it
            differ; or the destination is the source's own folder.
        OSError: The disk is full; what was at `destination` is intact.
    """
    check_cast(dtype)
    origin, out = _folders(source, destination)
    opened = open_source(source, check=check)
    refuse_differing_copies(opened)
    layout = opened.layout
    blocks = {name: Block.whole(name, canonical.shape) for name, canonical in layout.canonical.items()}
    contents = _contents(opened, blocks, dtype)
    plan = plan_files({name: (entry.dtype, entry.shape) for name, entry in contents.items()}, max_shard_size, {})
    with room_for(plan.nbytes, out.parent), FolderWriter(out) as folder, while_unchanged(opened.files):
        _Filler(opened, folder, progress, sum(entry.filled_bytes for entry in contents.values())).fill(plan, contents)
        write_companions(folder, plan, layout, layout.config, origin if copy_from is None else Path(copy_from))


def _folders(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the source's folder and the destination.

    Raises:
        ValueError: Source and destination are one folder.
    """
    path, out = Path(source), Path(destination)
    folder = path.parent if path.is_file() else path
    if folder.exists() and out.exists() and folder.samefile(out):
        raise ValueError(f"{out} is the folder of the source, which the result would replace; write to another folder")
    return folder, out


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: its pieces and its dtype."""

    block: Block
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.block.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def filled_bytes(self) -> int:
        """The bytes of all elements except padding."""
        pieces = (piece for piece in self.block.pieces if not piece.is_padding)
        return sum(volume(piece.local_range) for piece in pieces) * self.dtype.itemsize


def _contents(source: Source, blocks: Mapping[str, Block], dtype: torch.dtype | None) -> dict[str, _Entry]:
    """Return the tensors of a file of these blocks by local name, as far as the source has them."""
    return {
        local: _Entry(block, source.dtype(block.names, local, dtype))
        for local, block in blocks.items()
        if all(name in source.pieces for name in block.names)
    }


class _Filler:
    """Copies boxes from the source's files into laid-out files."""

    def __init__(self, source: Source, folder: Path, progress: Progress | None, total: int) -> None:
        self._source = source
        self._folder = folder
        self._progress = progress
        self._total = total
        self._done = 0
        self._reading, self._writing = StagingPool().on(_CPU), StagingPool().on(_CPU)
        self._counter = IOCounter()

    def fill(self, plan: FilePlan, entries: Mapping[str, _Entry]) -> None:
        """Create a plan's files and fill them; padding keeps the zeros of the new files."""
        create_files(self._folder, plan)
        copies: list[tuple[Path, TensorInfo, Copy, str]] = []
        with contextlib.ExitStack() as stack:
            opened = {
                file: stack.enter_context(open(self._folder / file, "r+b", buffering=0)) for file in plan.contents
            }
            for name, entry in entries.items():
                for key, copy in shared(entry.block, self._source.pieces):
                    copies.append((*self._source.tensors[key], copy, name))
            copies.sort(key=lambda item: (item[0], item[1].offset, item[2].source_range))
            for path, group in itertools.groupby(copies, key=lambda item: item[0]):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for _, info, copy, name in group:
                        file, to = plan.tensors[name]
                        self._copy(fd, info, opened[file].fileno(), to, copy, name)
                finally:
                    os.close(fd)
        plan.complete(self._folder)

    def _copy(self, source_fd: int, info: TensorInfo, fd: int, to: TensorInfo, copy: Copy, name: str) -> None:
        for part in self._reading.chunks(copy.source_range, info.dtype.itemsize):
            buffer = self._reading.view(extents(part), info.dtype)
            read_box(source_fd, info, part, buffer, self._reading, self._counter)
            refuse_overflow(name, buffer, to.dtype)
            write_box(fd, to, carried_over(part, copy), buffer, self._writing, self._counter)
            self._advance(volume(part) * to.dtype.itemsize)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
