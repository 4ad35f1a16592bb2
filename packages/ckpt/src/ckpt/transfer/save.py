"""Save a Hugging Face checkpoint: lay out the files, then let every rank write its own bytes. Nothing is gathered."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from ckpt.files.disk import room_for
from ckpt.files.tensor_bytes import sync_and_sum
from ckpt.files.written_files import Companions, FilePlan, create_files, plan_files, write_companions
from ckpt.layout.adapters import Change
from ckpt.layout.config import ConfigLike, load_config
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Piece
from ckpt.transfer.agreement import agree, agree_on_first, all_gather_json, require_same
from ckpt.transfer.exchange import WantedPiece
from ckpt.transfer.holdings import HeldPiece, Places, Tensors, take_stock
from ckpt.transfer.tied import require_equal_copies
from ckpt.transfer.writing import new_folder, reaching_ranks, write_pieces


def save_hf(
    path: str | os.PathLike[str],
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Places = None,
    *,
    group: ProcessGroup | None = None,
    config: ConfigLike | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    copy_from: str | os.PathLike[str] | Companions | None = None,
    change: Change | None = None,
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
        config: The content of config.json, saved with the stored dtypes; None: the layout's.
        dtype: The stored dtype; None: the tensors' own.
        max_shard_size: Bytes of one file, or a text such as "5GB".
        copy_from: A folder whose tokenizer, processor and generation files are copied, code is not; or the content of
            such files from `read_companions`. The first rank's are written.
        change: Changes the values of every box before they are written, such as `AdapterLayout.merging`.

    Raises:
        ValueError: Tensors are missing or unexpected, shapes or dtypes differ between ranks, the ranks together lack a
            part of the model, a weight is NaN or infinite, the copies of a tied embedding differ between pipeline
            stages, or the ranks differ in `layout`, `dtype` or `max_shard_size`; names the tensor or argument; on every
            rank.
        OSError: The disk is full or the folder cannot be written; the old checkpoint is intact; on every rank.
    """
    require_same(group, layout=layout.fingerprint, dtype=dtype, max_shard_size=max_shard_size)
    holdings = dataclasses.replace(take_stock(tensors, layout, place, group), change=change)

    def lay_out() -> tuple[FilePlan, dict[str, list[HeldPiece]]]:
        stored = holdings.stored_dtypes(dtype, layout)
        for name, kind in stored.items():
            if not kind.is_floating_point and not layout.canonical[name].carried:
                raise ValueError(f"{name} is of type {kind}, and weights are floating-point numbers; cast it")
        shapes = {name: (stored[name], holdings.shapes[name]) for name in stored}
        return plan_files(shapes, max_shard_size, layout.transposed), holdings.assign_owners()

    plan, owners = agree(lay_out, group)
    require_equal_copies(holdings, layout, group)
    target = Path(path)
    room = room_for(plan.nbytes, target)
    with new_folder(target, room, group) as folder:
        agree_on_first(room(lambda: create_files(folder, plan)), group)
        writers = reaching_ranks(folder, group)
        # Where not all ranks reach the folder, each file has one writer.
        one_each = {file: writers[index % len(writers)] for index, file in enumerate(plan.prefixes)}
        writer_of = {} if len(writers) == len(holdings.ranks) else one_each
        pieces: list[tuple[HeldPiece, WantedPiece]] = []
        for name, owned in owners.items():
            for held in owned:
                box = held.piece.canonical_range or ()
                writer = writer_of.get(plan.tensors[name][0], held.rank)
                pieces.append((held, WantedPiece(frozenset((writer,)), name, Piece(name, box, box))))
        write_pieces(folder, plan, pieces, holdings, group, room)

        @room
        def checksums() -> dict[str, str]:
            """Return the checksums of a share of the tensors; each rank that reaches the files syncs the files."""
            if holdings.rank not in writers:
                return {}
            mine = list(plan.tensors.items())[writers.index(holdings.rank) :: len(writers)]
            return sync_and_sum(folder, plan.contents, dict(mine))

        shares = all_gather_json(agree(checksums, group), group)

        @room
        def finish() -> None:
            plan.record_checksums(folder, {name: value for share in shares for name, value in share.items()})
            chosen = layout.config if config is None else load_config(config)
            write_companions(folder, plan, layout, chosen, copy_from)

        agree_on_first(finish, group)
