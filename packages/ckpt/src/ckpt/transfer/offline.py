"""Convert files to files, from any grid to any other, through a bounded buffer and without a process group."""

import contextlib
import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt.comparison.compare import refuse_differing_copies
from ckpt.files.atomic import FolderWriter
from ckpt.files.block_fp8 import SCALE, block_rows, is_quantized, quantize, scales_shape
from ckpt.files.boxio import STAGING_BYTES, Staging, read_box, write_box
from ckpt.files.contents import ADAPTER, CONFIG, LAYOUT, is_adapter
from ckpt.files.disk import room_for, while_unchanged
from ckpt.files.dtypes import check_cast, is_finite, non_finite
from ckpt.files.header import TensorInfo
from ckpt.files.mirror import open_weights, release
from ckpt.files.tensor_bytes import check_recorded
from ckpt.files.written_files import FilePlan, copy_companions, create_files, plan_files, write_companions, write_json
from ckpt.layout.adapters import Change
from ckpt.layout.config import read_json_file
from ckpt.layout.families.table import Target
from ckpt.layout.pieces import Block, Copy, Shape, carried_over, extents, shared, volume
from ckpt.layout.place import Grid, LayerPlacement
from ckpt.transfer.adapters import read_adapter
from ckpt.transfer.sources import layout_json, open_source, shard_name
from ckpt.transfer.tensor_files import Source

Progress = Callable[[int, int], None]
Blocks = dict[str, Block]


def reshard(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    grid: Grid,
    *,
    target: Target | None = None,
    layers: LayerPlacement = None,
    vocab_multiple: int = 1,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a sharded checkpoint for a grid from a Hugging Face or a sharded checkpoint, bitwise equal; atomically.

    The source's tokenizer, processor and generation files are copied. The source's bytes are compared with the
    checksums that it records. Memory: two buffers of 16 MiB for any model.

    Args:
        source: A Hugging Face folder, a sharded folder, or a file of weights.
        destination: The folder to write. An existing checkpoint is replaced; a folder with other files is refused.
        grid: The grid to write for.
        target: The target of the local tensors; None: the source's ("parallel" for Hugging Face).
        layers: As in `layout_for`.
        vocab_multiple: As in `layout_for`.
        dtype: Cast floating-point weights.
        progress: Called with bytes done and bytes in all.

    Raises:
        ValueError: The source is broken, damaged or was replaced meanwhile, the copies of a tied embedding in it
            differ, or the model does not fit the grid; or the destination is the source's own folder.
        OSError: The disk is full; what was at `destination` is intact.
    """
    if not isinstance(grid, Grid):
        raise ValueError(f"grid={grid!r:.100} must be a Grid, such as Grid(tp=2)")
    origin, opened = open_for_copy(source, destination, dtype)
    target = target or opened.layout.target
    predicting = opened.layout.prediction_layers
    if predicting and target != "parallel":
        warnings.warn(
            f"target={target!r} holds no multi-token-prediction layers: the {predicting} of {source} are left out; use "
            "target='parallel' to keep them",
            stacklevel=2,
        )
        predicting = 0
    layout = dataclasses.replace(
        opened.layout, target=target, layers=layers, vocab_multiple=vocab_multiple, prediction_layers=predicting
    )
    parts: list[tuple[FilePlan, Blocks]] = []
    for index, place in enumerate(grid.places()):
        blocks, contents = _contents(opened, layout.at(place), dtype)
        parts.append((FilePlan({shard_name(index, grid.size): contents}), blocks))

    def describe(folder: Path) -> None:
        copy_companions(origin, folder)
        write_json(folder / CONFIG, layout.config)
        write_json(folder / LAYOUT, layout_json(layout, grid))
        open_source(folder)

    _write(opened, Path(destination), parts, describe, progress)


def merge(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    format: Literal["fp8"] | None = None,
    max_shard_size: int | str = "5GB",
    copy_from: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a Hugging Face checkpoint from a sharded or a Hugging Face checkpoint, in other files or another dtype.

    The source may be pickled weights, `pytorch_model.bin` or its shards, which are read without running code. The
    folder appears at once; memory is bounded by two buffers of 16 MiB. A LoRA adapter is merged into its base, in fp64
    and rounded once. Recorded checksums are compared, as in `reshard`.

    Args:
        source: As in `reshard`; a run or a step of Megatron-Core (`torch_dist`), without its optimizer state; or a
            folder of PEFT with a LoRA adapter, which is held in memory.
        destination: As in `reshard`.
        dtype: Cast floating-point weights.
        format: "fp8": quantize the projections by blocks (`ckpt.files.block_fp8`); None: plain weights.
        max_shard_size: As in `save_hf`.
        copy_from: A folder whose tokenizer, processor and generation files are copied; None: the source. Its
            config.json counts where a Megatron-Core source has none.
        base: The model of an adapter (default: the model that its adapter_config.json names).
        progress: As in `reshard`.

    Raises:
        ValueError: As `reshard`; or the adapter is not of this base.
        OSError: As `reshard`.
    """
    adapter, config = Path(source), read_json_file(Path(source) / ADAPTER) if is_adapter(source) else None
    if config is None and base is not None:
        raise ValueError(f"base={base} is for adapters, and {source} is none; leave it out")
    if config is not None:
        source = _base_of(adapter, config, base)
    if config is not None and format is not None:
        raise ValueError(f"format={format!r} does not take an adapter; merge it, then convert the result")
    if format not in (None, "fp8"):
        raise ValueError(f"format={format!r} is unknown; use 'fp8', or None for plain weights")
    origin, opened = open_for_copy(source, destination, dtype, pickled=True, copy_from=copy_from)
    change = None if config is None else read_adapter(adapter, opened.layout, config)
    companions = origin if copy_from is None else Path(copy_from)
    write_whole(opened, Path(destination), companions, dtype, format, max_shard_size, progress, change)


def write_whole(
    opened: Source,
    destination: Path,
    companions: Path,
    dtype: torch.dtype | None,
    format: Literal["fp8"] | None = None,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
    change: Change | None = None,
) -> None:
    """Write the canonical tensors of an opened source as a Hugging Face checkpoint; see `merge` for the arguments.

    `companions` is the folder whose tokenizer, processor and generation files are copied. Values go through `change`.
    """
    layout = opened.layout
    whole = {name: Block.whole(name, canonical.shape) for name, canonical in layout.canonical.items()}
    blocks, contents = _contents(opened, whole, dtype)
    quantized = [name for name, (_, shape) in contents.items() if format == "fp8" and is_quantized(name, shape)]
    for name in quantized:
        shape, _ = blocks.pop(name).shape, contents.pop(name)
        contents |= {name: (torch.float8_e4m3fn, shape), name + SCALE: (torch.float32, scales_shape(shape))}
    plan = plan_files(contents, max_shard_size, layout.transposed)

    def describe(folder: Path) -> None:
        write_companions(folder, plan, layout, layout.config, companions)

    _write(opened, destination, [(plan, blocks)], describe, progress, quantized, change)


def _base_of(adapter: Path, config: Mapping[str, Any], base: str | os.PathLike[str] | None) -> Path:
    """Return the folder of an adapter's model; refuse an adapter that names no folder here."""
    named = config.get("base_model_name_or_path") if base is None else base
    if named is None or not Path(named).exists():
        relative = named is not None and base is None and not Path(named).is_absolute()
        what = ", a path relative to another working directory or a name on a hub," if relative else ""
        raise ValueError(
            f"{adapter} adapts the model {named}{what} which is no folder here; give the model's folder with --base "
            "(base= in Python)"
        )
    return Path(named)


def open_for_copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: torch.dtype | None,
    *,
    pickled: bool = False,
    copy_from: str | os.PathLike[str] | None = None,
) -> tuple[Path, Source]:
    """Return the source's folder, and the opened source; refuse a destination that is the source."""
    check_cast(dtype)
    path, out = Path(source), Path(destination)
    folder = path.parent if path.is_file() else path
    if folder.exists() and out.exists() and folder.samefile(out):
        raise ValueError(f"{out} is the folder of the source, which the result would replace; write to another folder")
    opened = open_source(source, pickled=pickled, copy_from=copy_from)
    refuse_differing_copies(opened)
    return folder, opened


def _contents(
    source: Source, blocks: Mapping[str, Block], dtype: torch.dtype | None
) -> tuple[Blocks, dict[str, tuple[torch.dtype, Shape]]]:
    """Return the blocks that the source can fill, and the dtypes and shapes of their tensors."""
    held = {
        name: block for name, block in blocks.items() if all(part_name in source.pieces for part_name in block.names)
    }
    return held, {name: (source.dtype(block.names, name, dtype), block.shape) for name, block in held.items()}


def _write(
    source: Source,
    out: Path,
    parts: Sequence[tuple[FilePlan, Blocks]],
    describe: Callable[[Path], None],
    progress: Progress | None,
    quantized: Sequence[str] = (),
    change: Change | None = None,
) -> None:
    """Write planned files, one part after another, into a folder that appears at once.

    Each file of the source is compared with its recorded checksums before it is copied, so that the copy reads it from
    the page cache.
    `describe` writes the other files. `progress` counts no padding. The plan has the tensors `quantized` in FP8. Values
    go through `change`, by the names of the plan.
    """
    filled = ((plan, name, piece) for plan, blocks in parts for name, block in blocks.items() for piece in block.pieces)
    total = sum(
        volume(piece.local_range) * plan.tensors[name][1].dtype.itemsize
        for plan, name, piece in filled
        if not piece.is_padding
    )
    total += sum(plan.tensors[name][1].nbytes for plan, _ in parts for name in quantized)
    done = 0
    broken: set[str] = set()
    staging, buffer = Staging(), Staging()

    def move(source_fd: int, info: TensorInfo, fd: int, to: TensorInfo, copy: Copy, name: str) -> None:
        nonlocal done
        for chunk in buffer.chunks(copy.source_range, max(info.dtype.itemsize, to.dtype.itemsize)):
            values = buffer.view(extents(chunk), to.dtype)
            read_box(source_fd, info, chunk, values, staging, name)
            box = carried_over(chunk, copy)
            values = values if change is None else change([name], box, values[None])[0]
            if not is_finite(values):
                broken.add(name)
            write_box(fd, to, box, values, staging)
            done += volume(chunk) * to.dtype.itemsize
            if progress is not None:
                progress(done, total)

    def quantize_into(plan: FilePlan, files: Mapping[str, int], name: str) -> None:
        nonlocal done
        file, to = plan.tensors[name]
        scale_file, scale_to = plan.tensors[name + SCALE]
        for box, scale_box in block_rows(to.shape, STAGING_BYTES // torch.float32.itemsize):
            values = source.values(name, box, torch.float32)
            if not is_finite(values):
                broken.add(name)
            numbers, scales = quantize(values)
            write_box(files[file], to, box, numbers, staging)
            write_box(files[scale_file], scale_to, scale_box, scales, staging)
            done += volume(box)
            if progress is not None:
                progress(done, total)

    # The file in which each of these tensors begins: a mirror has one file of weights at a time.
    quantized_of: dict[Path, list[str]] = {}
    for name in quantized:
        quantized_of.setdefault(source.tensors[source.pieces[name][0][0]][0], []).append(name)
    unchecked = dict(source.headers)
    needed = sum(plan.nbytes for plan, _ in parts)
    with room_for(needed, out), FolderWriter(out) as folder, while_unchanged(source.files):
        for plan, blocks in parts:
            create_files(folder, plan)  # padding keeps the zeros of the new files
            copies = [
                (*source.tensors[key], copy, name)
                for name, block in blocks.items()
                for key, copy in shared(block, source.pieces)
            ]
            copies.sort(key=lambda item: (item[0], item[1].offset, item[2].source_range))
            with contextlib.ExitStack() as stack:
                files = {
                    file: stack.enter_context(open(folder / file, "r+b", buffering=0)).fileno()
                    for file in plan.contents
                }
                groups = {path: [*group] for path, group in itertools.groupby(copies, key=lambda item: item[0])}
                for path in sorted(groups.keys() | quantized_of.keys()):
                    if path in unchecked:
                        check_recorded({path: unchecked.pop(path)})
                    with open_weights(path) as opened:
                        for _, info, copy, name in groups.get(path, ()):
                            file, to = plan.tensors[name]
                            move(opened.fileno(), info, files[file], to, copy, name)
                    for name in quantized_of.get(path, ()):
                        quantize_into(plan, files, name)
                    if len(parts) == 1:
                        release(path)
                check_recorded(unchecked)
                unchecked.clear()
            plan.complete(folder)
        describe(folder)
    if broken:
        warnings.warn(f"{non_finite(broken)}; a conversion keeps the values", stacklevel=3)
