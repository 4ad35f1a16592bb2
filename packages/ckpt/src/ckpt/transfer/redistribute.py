"""Move a model from one grid to another inside one process group, without files or gathers."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import view_of
from ckpt.files.dtypes import joined_dtype
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, all_gather_json, require_same
from ckpt.transfer.exchange import BUCKET_BYTES, Want, copy_into, exchange, plan_moves
from ckpt.transfer.holdings import Held, Holdings, Tensors, places_of, take_stock
from ckpt.transfer.sources import require_same_model
from ckpt.transfer.tied import require_equal_copies


def redistribute(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Place | Sequence[Place],
    to_layout: Layout,
    to_place: Place | Sequence[Place],
    *,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    bucket_bytes: int = BUCKET_BYTES,
) -> list[dict[str, Tensor]]:
    """Move a model, or a moment of all its parameters, to another grid and target; bitwise equal unless `dtype` casts.

    Collective over `group`, which spans both grids. One of the ranks that hold a box sends the box once to each rank
    that wants it.

    Args:
        tensors: This rank's tensors, or one mapping for each chunk; empty for a rank that holds nothing; DTensors
            under FSDP2.
        layout: The layout of the tensors.
        place: This rank's place now, or one place for each chunk; `[]` for none.
        to_layout: The layout of the result: the same model, on any target.
        to_place: This rank's new place, or one place for each chunk; `[]` for none.
        group: The ranks of both grids; None: this process alone.
        dtype: Cast floating-point tensors.
        device: The device of the result.
        bucket_bytes: The size of one communication, in bytes.

    Returns:
        For each new place: local name -> tensor, with zeros as padding.

    Raises:
        ValueError: The layouts are of different models, the tensors do not fit, or the copies of a tied embedding
            differ between pipeline stages; on every rank.
    """
    require_same(
        group, layout=layout.fingerprint, to_layout=to_layout.fingerprint, bucket_bytes=bucket_bytes, dtype=dtype
    )
    holdings = take_stock(tensors, layout, place, group)
    mine = places_of(to_place)

    def prepare() -> tuple[dict[str, list[Held]], list[dict[str, Tensor]]]:
        require_same_model(layout, to_layout)
        types = holdings.stored_dtypes(dtype, layout)
        chunks = [
            {
                name: torch.empty(
                    block.shape,
                    dtype=joined_dtype(name, {types[source] for source in block.names}, None),
                    device=device,
                )
                for name, block in _held_blocks(to_layout, at, holdings).items()
            }
            for at in mine
        ]
        return holdings.assign_owners(), chunks

    owners, results = agree(prepare, group)
    require_equal_copies(holdings, layout, group)
    messages = all_gather_json([at.to_json() for at in mine], group)
    wants: dict[str, list[Want]] = {name: [] for name in holdings.dtypes}
    for rank, message in enumerate(messages):
        for chunk, entry in enumerate(message):
            for name, block in _held_blocks(to_layout, Place(**entry), holdings).items():
                for piece in block.pieces:
                    if not piece.is_padding:
                        wants[piece.name].append(Want(frozenset((rank,)), f"{chunk}:{name}", piece))
                    elif rank == holdings.rank:
                        view_of(results[chunk][name], piece.local_range).zero_()

    def deliver(want: Want, box: Box, values: Tensor) -> None:
        chunk, _, name = want.tensor.partition(":")
        copy_into(results[int(chunk)][name], box, values)

    moves = plan_moves(holdings, ((owners[name], wanted) for name, wanted in wants.items()), bucket_bytes)
    for _ in exchange(holdings, moves, group, deliver):
        pass
    return results


def _held_blocks(layout: Layout, place: Place, holdings: Holdings) -> dict[str, Block]:
    return {
        name: block
        for name, block in layout.at(place).items()
        if all(source in holdings.dtypes for source in block.names)
    }
