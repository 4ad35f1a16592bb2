"""Write the ranks' pieces into files: into a folder that appears at once, by ranks that reach the folder."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import ContextDecorator
from pathlib import Path

from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.atomic import FolderWriter
from ckpt.files.boxio import Staging, write_box
from ckpt.files.dtypes import is_finite, non_finite
from ckpt.files.written_files import FilePlan
from ckpt.layout.pieces import Box
from ckpt.transfer.agreement import agree, agree_on_first, all_gather_json
from ckpt.transfer.exchange import WantedPiece, exchange, plan_moves
from ckpt.transfer.holdings import HeldPiece, Holdings


@contextlib.contextmanager
def new_folder(target: Path, room: ContextDecorator, group: ProcessGroup | None) -> Iterator[Path]:
    """Give every rank the temporary folder that rank 0 makes beside `target`; put it in place after the body.

    `room` is the `room_for` of the save, for the error of a full disk.

    Raises:
        ValueError: The target is a folder that must not be replaced; on every rank.
        OSError: The disk is full; on every rank.
    """
    writer = agree_on_first(room(lambda: FolderWriter(target)), group)
    try:
        yield Path(all_gather_json(None if writer is None else str(writer.path), group)[0])
        agree(room(lambda: None if writer is None else writer.commit()), group)
    finally:
        if writer is not None:
            writer.discard()  # does nothing after a commit


def reaching_ranks(folder: Path, group: ProcessGroup | None) -> list[int]:
    """Return the ranks that see a folder that another rank has just created, and may write in it."""
    reach = all_gather_json(os.access(folder, os.W_OK | os.X_OK), group)
    return [rank for rank, can in enumerate(reach) if can]


def write_pieces(
    folder: Path,
    plan: FilePlan,
    pieces: list[tuple[HeldPiece, WantedPiece]],
    holdings: Holdings,
    group: ProcessGroup | None,
    room: ContextDecorator,
) -> None:
    """Write pieces into files that exist; a rank that does not write its own piece sends it, in bounded buckets.

    `pieces` has the owned pieces of all ranks, in the same order on every rank. The `WantedPiece` of each names the
    rank that writes the piece, the tensor in the files of `plan`, and the piece's box in that tensor.

    Raises:
        ValueError: A weight is NaN or infinite; names the tensors; on every rank. Optimizer state is not looked at.
        OSError: The disk is full, or a file cannot be written; on every rank.
    """
    mine = [(held, want) for held, want in pieces if holdings.rank in want.ranks]
    staging = Staging()
    errors: list[OSError] = []
    broken: set[str] = set()
    with contextlib.ExitStack() as stack:
        files = dict.fromkeys(plan.tensors[want.tensor][0] for _, want in mine)

        @room
        def opened() -> dict[str, int]:
            return {file: stack.enter_context(open(folder / file, "r+b", buffering=0)).fileno() for file in files}

        fds = agree(opened, group)

        def deliver(want: WantedPiece, box: Box, values: Tensor) -> None:
            # An error here must not stop this rank before the others: the collectives go on, and all agree afterwards.
            if errors:
                return
            if not want.piece.name.startswith("optimizer/") and not is_finite(values):
                broken.add(want.piece.name.removeprefix("model/"))
            try:
                file, info = plan.tensors[want.tensor]
                write_box(fds[file], info, box, values, staging)
            except OSError as error:
                errors.append(error)

        if all(held.rank in want.ranks for held, want in pieces):
            for held, want in mine:
                deliver(want, want.piece.local_range, holdings.values(held, held.piece.local_range))
        else:
            moves = plan_moves(holdings, (([held], want) for held, want in pieces))
            for _ in exchange(holdings, moves, group, deliver):
                pass

        @room
        def end() -> None:
            if errors:
                raise errors[0]
            if broken:
                raise ValueError(
                    f"{non_finite(broken)}, so nothing is saved, and what was saved before is intact; go back to the "
                    "last checkpoint, and lower the learning rate if training has diverged"
                )
            stack.close()

        agree(end, group)
