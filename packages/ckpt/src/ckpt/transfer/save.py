"""Save a Hugging Face checkpoint: lay out the files, then let every rank write its own bytes. Nothing is gathered."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.atomic import FolderWriter
from ckpt.files.boxio import IOCounter, StagingPool, view_of, write_box
from ckpt.files.disk import room_for
from ckpt.files.tensor_bytes import sync_and_sum
from ckpt.files.written_files import FilePlan, create_files, plan_files, write_companions
from ckpt.layout.config import ConfigLike, load_config
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Box, Piece, intersect, volume
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, all_gather_json, require_same
from ckpt.transfer.exchange import Want, exchange, plan_moves
from ckpt.transfer.holdings import Holdings, Tensors, take_stock
from ckpt.transfer.owners import Held, assign_owners
from ckpt.transfer.tied import require_equal_copies

Progress = Callable[[int, int], None]


def save_hf(
    path: str | os.PathLike[str],
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Place | Sequence[Place] | None = None,
    *,
    group: ProcessGroup | None = None,
    config: ConfigLike | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    copy_from: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    counter: IOCounter | None = None,
) -> None:
    """Write a Hugging Face checkpoint from the ranks' own tensors.

    All ranks of `group` call this. The checkpoint appears at `path` in one step when it is complete and synced. Until
    then, and after a kill at any instant, `path` is unchanged (see `ckpt.files.atomic`).

    Communication: a few small JSON all-gathers; no tensor leaves its rank. Ranks that do not reach the folder send
    their pieces to ranks that do, one writer for each file, a bucket at a time.

    Args:
        path: The checkpoint folder. An existing checkpoint is replaced, with its tokenizer files (`copy_from=path`
            keeps them). A folder with any other file is refused.
        tensors: This rank's tensors by local name, on any device; a sequence of mappings for a rank with several
            chunks. Each rank writes its own part of a DTensor.
        layout: From `layout_for`.
        place: This rank's place, or one for each chunk; None: this process holds everything.
        group: The ranks that together hold the model, replicas included; None: this process alone.
        config: The content of config.json, saved with the stored dtypes and without multi-token-prediction layers;
            None: the layout's.
        dtype: The stored dtype; None: the tensors' own.
        max_shard_size: Bytes of one file, or a text such as "5GB".
        copy_from: A folder whose tokenizer, processor and generation files are copied; code is not.
        metadata: Strings recorded in every file's header.
        progress: Called on the group's first rank with its bytes written so far and its bytes in all.
        counter: Counts the bytes and calls of this rank's writes.

    Raises:
        ValueError: Tensors are missing or unexpected, shapes or dtypes differ between ranks, the ranks together lack a
            part of the model, the copies of a tied embedding differ between pipeline stages, or the ranks differ in
            `layout`, `dtype`, `max_shard_size` or `metadata`; names the tensor or argument; on every rank.
        OSError: The disk is full or the folder cannot be written; the old checkpoint is intact; on every rank.
    """
    require_same(
        group,
        layout=layout.fingerprint,
        dtype=dtype,
        max_shard_size=max_shard_size,
        metadata=sorted((metadata or {}).items()),
    )
    holdings = take_stock(tensors, layout, place, group)

    def lay_out() -> tuple[FilePlan, dict[str, list[Held]]]:
        stored = holdings.stored_dtypes(dtype)
        for name, kind in stored.items():
            if not kind.is_floating_point and not layout.canonical[name].carried:
                raise ValueError(f"{name} is of type {kind}, and weights are floating-point numbers; cast it")
        shapes = {name: (stored[name], layout.canonical[name].shape) for name in stored}
        owners = assign_owners(holdings)
        return plan_files(shapes, max_shard_size, metadata or {}), owners

    plan, owners = agree(lay_out, group)
    require_equal_copies(holdings, group)
    room = room_for(plan.nbytes, Path(path).parent)
    writer = agree(room(lambda: FolderWriter(Path(path)) if holdings.rank == 0 else None), group)
    count = IOCounter() if counter is None else counter
    shown = progress if holdings.rank == 0 else None
    try:
        folder = Path(all_gather_json(None if writer is None else str(writer.path), group)[0])
        agree(room(lambda: create_files(folder, plan) if writer else None), group)
        reach = all_gather_json(_can_write(folder, plan), group)
        writers = [rank for rank, can in enumerate(reach) if can]
        if all(reach):
            agree(room(lambda: _write(folder, plan, owners, holdings, shown, count)), group)
        else:
            _send(folder, plan, owners, holdings, writers, group, shown, count)
        sums = _checksums(folder, plan, holdings.rank, writers, group)

        @room
        def finish() -> None:
            if writer is not None:
                plan.record_checksums(folder, sums)
                chosen = layout.config if config is None else load_config(config)
                source = None if copy_from is None else Path(copy_from)
                write_companions(folder, plan, layout, chosen, source)
                writer.commit()

        agree(finish, group)
    except BaseException:
        if writer is not None:
            writer.discard()
        raise


def _checksums(folder: Path, plan: FilePlan, rank: int, ranks: list[int], group: ProcessGroup | None) -> dict[str, str]:
    """Return every tensor's checksum; the ranks that reach the files divide the tensors, and each syncs the files."""

    @room_for(plan.nbytes, folder.parent)
    def share() -> dict[str, str]:
        if rank not in ranks:
            return {}
        mine = list(plan.tensors.items())[ranks.index(rank) :: len(ranks)]
        return sync_and_sum(folder, plan.contents, dict(mine))

    return {name: value for message in all_gather_json(agree(share, group), group) for name, value in message.items()}


def _can_write(folder: Path, plan: FilePlan) -> bool:
    """Return whether this rank sees the files that rank 0 has created."""
    return all(os.access(folder / file, os.W_OK) for file in plan.prefixes)


class _Meter:
    """Reports the progress of this rank's writes."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        """Count further bytes as written."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write(
    folder: Path,
    plan: FilePlan,
    owners: dict[str, list[Held]],
    holdings: Holdings,
    progress: Progress | None,
    counter: IOCounter,
) -> None:
    """Write the boxes that this rank owns, file by file; `_checksums` syncs them."""
    mine: dict[str, list[tuple[str, Held]]] = {}
    for name, pieces in owners.items():
        for held in pieces:
            if held.rank == holdings.rank:
                mine.setdefault(plan.tensors[name][0], []).append((name, held))
    meter = _Meter(progress, sum(_nbytes(plan, held) for entries in mine.values() for _, held in entries))
    stagings = StagingPool()
    for file, entries in mine.items():
        with open(folder / file, "r+b", buffering=0) as opened:
            for name, held in entries:
                info = plan.tensors[name][1]
                tensor = holdings.chunks[held.chunk].tensors[held.local]
                copy = intersect(held.piece, Piece.whole(name, info.shape))
                if copy is not None:
                    view = view_of(tensor, copy.source_range)
                    write_box(opened.fileno(), info, copy.destination_range, view, stagings.on(tensor.device), counter)
                    meter.add(_nbytes(plan, held))


def _nbytes(plan: FilePlan, held: Held) -> int:
    """Return the bytes of a piece in its file."""
    return volume(held.piece.local_range) * plan.tensors[held.piece.name][1].dtype.itemsize


def _send(
    folder: Path,
    plan: FilePlan,
    owners: dict[str, list[Held]],
    holdings: Holdings,
    writers: list[int],
    group: ProcessGroup | None,
    progress: Progress | None,
    counter: IOCounter,
) -> None:
    """Send pieces to the writer of their file: each file has one writer among the ranks that reach the files."""
    files = list(plan.prefixes)
    writer_of = {file: writers[index % len(writers)] for index, file in enumerate(files)}
    wants = (
        (name, [Want(frozenset((writer_of[file],)), file, Piece.whole(name, info.shape))])
        for name, (file, info) in plan.tensors.items()
    )
    stagings = StagingPool()
    errors: list[OSError] = []

    with contextlib.ExitStack() as stack:
        mine = [file for file in files if writer_of[file] == holdings.rank]
        meter = _Meter(progress, sum(info.nbytes for file, info in plan.tensors.values() if file in mine))
        fds = agree(
            lambda: {file: stack.enter_context(open(folder / file, "r+b", buffering=0)).fileno() for file in mine},
            group,
        )

        def deliver(want: Want, box: Box, values: Tensor) -> None:
            # An error here must not stop this rank before the others: the collectives go on, and all agree afterwards.
            if not errors:
                try:
                    info = plan.tensors[want.piece.name][1]
                    write_box(fds[want.tensor], info, box, values, stagings.on(values.device), counter)
                    meter.add(volume(box) * info.dtype.itemsize)
                except OSError as error:
                    errors.append(error)

        for _ in exchange(holdings, plan_moves(holdings, owners, wants), group, deliver):
            pass

        @room_for(plan.nbytes, folder.parent)
        def end() -> None:
            if errors:
                raise errors[0]
            stack.close()

        agree(end, group)
