"""Write Megatron-Core's distributed checkpoints (`torch_dist`), without Megatron-Core and without a GPU."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt.files.atomic import FolderWriter
from ckpt.files.contents import CONFIG, MEGATRON_FORMAT, RELEASE, TRACKER
from ckpt.files.disk import room_for, sync, while_unchanged
from ckpt.files.dtypes import is_finite, non_finite
from ckpt.files.tensor_bytes import check_recorded
from ckpt.files.torch_dist import ChunkWriter, read_index
from ckpt.files.written_files import copy_companions, write_json
from ckpt.layout.families.table import Target
from ckpt.layout.megatron_names import stored_blocks
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Shape, extents, full_box, shared, split_box, volume
from ckpt.layout.place import Grid
from ckpt.transfer.megatron import stored_files
from ckpt.transfer.offline import Progress, open_for_copy
from ckpt.transfer.parallel_reads import read_all
from ckpt.transfer.tensor_files import Index, TensorFiles

# The largest chunk: each is held in memory, and written by torch.save.
_CHUNK_BYTES = 8 << 20
# Megatron's readers ask for the form of names and of optimizer state; numbers of layers are part of our names.
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}
_FORMAT = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}


def to_megatron(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    grid: Grid | None = None,
    *,
    target: Target = "megatron_te",
    vocab_multiple: int = 1,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint as a run of Megatron-Core, whose weights any grid can load; atomically.

    `latest_checkpointed_iteration.txt` says "release", and `release/` has the tensors, for
    `megatron.core.dist_checkpointing.load(state, DESTINATION/release)`. config.json and the tokenizer's files are
    copied beside them. Memory: two chunks of 8 MiB, and the index of the tensors.

    Args:
        source: A Hugging Face folder, a sharded folder, a file of weights, or another run of Megatron-Core.
        destination: The folder to write. An existing checkpoint is replaced; a folder with other files is refused.
        grid: Divide the files as the ranks of this grid hold the tensors, so that each rank reads one file alone; None:
            one file.
        target: "megatron_te": the names of Transformer Engine's spec, as in Megatron-Bridge; "megatron": of the
            local spec.
        vocab_multiple: Pad each rank's vocabulary rows up to a multiple of this.
        dtype: Cast floating-point weights.
        progress: Called with bytes done and bytes in all.

    Raises:
        ValueError: As `reshard`; or Megatron-Core has no such model.
        OSError: The disk is full; what was at `destination` is intact.
    """
    if target not in ("megatron", "megatron_te"):
        raise ValueError(f"target={target!r} is no model of Megatron-Core; use 'megatron_te' or 'megatron'")
    grid = Grid() if grid is None else grid
    origin, opened = open_for_copy(source, destination, dtype)
    layout = opened.layout
    if layout.prediction_layers:
        warnings.warn(
            f"Megatron-Core's layouts hold no multi-token-prediction layers: the {layout.prediction_layers} of "
            f"{origin} are left out",
            stacklevel=3,
        )
    blocks = {
        name: block
        for name, block in stored_blocks(layout, target, rows=vocab_multiple * grid.tp).items()
        if all(canonical in opened.pieces for canonical in block.names)
    }
    dtypes = {name: opened.dtype(block.names, name, dtype) for name, block in blocks.items()}
    ranks = chunks_of_ranks(layout, blocks, grid, target, vocab_multiple)

    def describe(folder: Path) -> None:
        copy_companions(origin, folder)
        write_json(folder / CONFIG, layout.config)

    write_run(opened, blocks, dtypes, ranks, Path(destination), describe, progress=progress)


def write_run(
    files: TensorFiles,
    blocks: Mapping[str, Block],
    dtypes: Mapping[str, torch.dtype],
    ranks: Sequence[Sequence[tuple[str, Box]]],
    destination: Path,
    describe: Callable[[Path], None],
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a run of Megatron-Core with one step; warn about tensors that hold NaN or infinite values.

    Args:
        files: The tensors that the blocks name.
        blocks: Stored name -> block.
        dtypes: Stored name -> dtype.
        ranks: The chunks of each rank's file: (stored name, box).
        destination: As in `to_megatron`.
        describe: Writes config.json and other files into the run's folder.
        step: The number of training steps; None: the weights of a release.
        progress: As in `to_megatron`.
    """
    total = sum(volume(full_box(block.shape)) * dtypes[name].itemsize for name, block in blocks.items())
    done = 0
    unchecked, broken = dict(files.headers), set[str]()

    def values(name: str, box: Box) -> torch.Tensor:
        nonlocal done
        tensor = torch.empty(extents(box), dtype=dtypes[name])
        reads = list(files.reads(tensor, blocks[name].part(box)))
        check_recorded({path: unchecked.pop(path) for path in {read.path for read in reads} & unchecked.keys()})
        read_all(reads)
        if not is_finite(tensor):
            broken.add(name)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
        return tensor

    def chunks(rank: Sequence[tuple[str, Box]]) -> Iterator[tuple[str, Shape, Box, torch.Tensor]]:
        for name, whole in rank:
            for box in split_box(whole, _CHUNK_BYTES // dtypes[name].itemsize):
                yield name, blocks[name].shape, box, values(name, box)

    with room_for(total, destination), FolderWriter(destination) as out, while_unchanged(files.files):
        latest = RELEASE if step is None else str(step)
        folder = out / (RELEASE if step is None else f"iter_{step:07d}")
        folder.mkdir()
        writer = ChunkWriter(folder)
        for number, rank in enumerate(ranks):
            writer.write_file(number, chunks(rank))
        check_recorded(unchecked)
        writer.write_index()
        common = {"checkpoint_version": 3.0, "iteration": step or 0, "content_metadata": _CONTENT}
        torch.save(common, folder / "common.pt")
        write_json(folder / MEGATRON_FORMAT, _FORMAT)
        (out / TRACKER).write_text(latest)
        describe(out)
        for path in (folder / "common.pt", folder, out / TRACKER):
            sync(path)
        stored_files(read_index(folder), blocks, folder)  # checks that every element has its place
    if broken:
        warnings.warn(f"{non_finite(broken)}; a conversion keeps the values", stacklevel=3)


def chunks_of_ranks(
    layout: Layout, blocks: Mapping[str, Block], grid: Grid, target: Target, vocab_multiple: int
) -> list[list[tuple[str, Box]]]:
    """Return the chunks of each rank's file: what the rank holds on the grid, each element in one file alone."""
    placed = dataclasses.replace(layout, target=target, vocab_multiple=vocab_multiple, prediction_layers=0)
    index: Index = {}
    for name, block in blocks.items():
        for piece in block.pieces:
            if not piece.is_padding:
                index.setdefault(piece.name, []).append((name, piece))
    files: dict[Any, list[tuple[str, Box]]] = {}
    taken: dict[str, set[Box]] = {}
    for place in grid.places():
        chunks = files.setdefault((place.pp, place.ep, place.etp, place.tp), [])
        for block in placed.at(place).values():
            held = [(name, copy.source_range) for name, copy in shared(block, index)]
            for name, box in _joined(held):
                if box not in taken.setdefault(name, set()):
                    taken[name].add(box)
                    chunks.append((name, box))
    for name, block in blocks.items():
        padding = [(name, piece.local_range) for piece in block.pieces if piece.is_padding]
        last = next(chunks for chunks in reversed(files.values()) if any(other == name for other, _ in chunks))
        last += padding
    return list(files.values())


def _joined(boxes: list[tuple[str, Box]]) -> Iterator[tuple[str, Box]]:
    """Join boxes of one tensor that follow one another along a dimension."""
    current: tuple[str, Box] | None = None
    for name, box in boxes:
        if current is not None and current[0] == name:
            differing = [dim for dim, (a, b) in enumerate(zip(current[1], box, strict=True)) if a != b]
            if len(differing) == 1 and current[1][(dim := differing[0])][1] == box[dim][0]:
                joined = (current[1][dim][0], box[dim][1])
                current = name, (*box[:dim], joined, *box[dim + 1 :])
                continue
        if current is not None:
            yield current
        current = name, box
    if current is not None:
        yield current
