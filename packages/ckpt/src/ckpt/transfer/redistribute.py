"""Move a model and its optimizer state from one grid to another inside one process group, without files or gathers."""

from collections.abc import Mapping, Sequence
from typing import overload

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
from ckpt.transfer.holdings import Holdings, Tensors, take_stock
from ckpt.transfer.owners import Held, assign_owners
from ckpt.transfer.tied import require_equal_copies

Places = Place | Sequence[Place]
OptimizerState = Mapping[str, Mapping[str, Tensor]]
Blocks = dict[str, Block]


@overload
def redistribute(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Places,
    to_layout: Layout,
    to_place: Place,
    *,
    group: ProcessGroup | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str = ...,
    bucket_bytes: int = ...,
) -> dict[str, Tensor]: ...


@overload
def redistribute(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Places,
    to_layout: Layout,
    to_place: Sequence[Place],
    *,
    group: ProcessGroup | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str = ...,
    bucket_bytes: int = ...,
) -> list[dict[str, Tensor]]: ...


def redistribute(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    place: Places,
    to_layout: Layout,
    to_place: Places,
    *,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Tensor] | list[dict[str, Tensor]]:
    """Move a model from one grid and target to another; bitwise equal unless `dtype` casts.

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
        Local name -> tensor, with zeros as padding; a list of such mappings for a sequence of places.

    Raises:
        ValueError: The layouts are of different models, the tensors do not fit, or the copies of a tied embedding
            differ between pipeline stages; on every rank.
    """
    require_same(
        group, layout=layout.fingerprint, to_layout=to_layout.fingerprint, bucket_bytes=bucket_bytes, dtype=dtype
    )
    holdings = take_stock(tensors, layout, place, group)
    mine = [to_place] if isinstance(to_place, Place) else list(to_place)

    def prepare() -> tuple[dict[str, list[Held]], list[dict[str, Tensor]]]:
        _check_same_model(layout, to_layout)
        types = holdings.stored_dtypes(dtype)
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
        return assign_owners(holdings), chunks

    owners, results = agree(prepare, group)
    require_equal_copies(holdings, group)
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

    for _ in exchange(holdings, plan_moves(holdings, owners, wants.items(), bucket_bytes), group, deliver):
        pass
    return results[0] if isinstance(to_place, Place) else results


@overload
def redistribute_optimizer(
    state: OptimizerState | Sequence[OptimizerState],
    layout: Layout,
    place: Places,
    to_layout: Layout,
    to_place: Place,
    *,
    group: ProcessGroup | None = ...,
    device: torch.device | str = ...,
) -> dict[str, dict[str, Tensor]]: ...


@overload
def redistribute_optimizer(
    state: OptimizerState | Sequence[OptimizerState],
    layout: Layout,
    place: Places,
    to_layout: Layout,
    to_place: Sequence[Place],
    *,
    group: ProcessGroup | None = ...,
    device: torch.device | str = ...,
) -> list[dict[str, dict[str, Tensor]]]: ...


def redistribute_optimizer(
    state: OptimizerState | Sequence[OptimizerState],
    layout: Layout,
    place: Places,
    to_layout: Layout,
    to_place: Places,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, dict[str, Tensor]] | list[dict[str, dict[str, Tensor]]]:
    """Move an optimizer's state, `{local name: {slot: tensor}}`, from one grid and target to another.

    A slot of the parameter's shape (a moment) moves like the parameter; a slot of one element (a step count) goes with
    the canonical tensors that make up the parameter. A rank with several chunks, or none, passes sequences, as for
    `redistribute`.

    Raises:
        ValueError: Parameters lack a slot that others have; or step counts differ between tensors to be fused, or
            between ranks; or the moments of a tied embedding's copies differ; on every rank.
    """
    held = [state] if isinstance(state, Mapping) else list(state)
    places = [place] if isinstance(place, Place) else list(place)
    to_places = [to_place] if isinstance(to_place, Place) else list(to_place)

    def look() -> tuple[list[Blocks], list[Blocks], dict[str, tuple[bool, str]]]:
        if len(held) != len(places):
            raise ValueError(f"{len(held)} optimizer states for {len(places)} places; pass one for each chunk")
        blocks = [layout.at(at) for at in places]
        return blocks, [to_layout.at(at) for at in to_places], _slots(held, blocks)

    blocks, to_blocks, slots = agree(look, group)
    kinds = {slot: kind for message in all_gather_json(slots, group) for slot, kind in message.items()}
    results: list[dict[str, dict[str, Tensor]]] = [{name: {} for name in chunk} for chunk in to_blocks]
    for slot, (is_scalar, dtype) in sorted(kinds.items()):
        values = [{name: entries[slot] for name, entries in chunk.items() if slot in entries} for chunk in held]
        if is_scalar:
            moved = _redistribute_scalars(slot, values, blocks, to_blocks, dtype, group)
        else:
            moved = redistribute(values, layout, places, to_layout, to_places, group=group, device=device)
        for result, tensors in zip(results, moved, strict=True):
            for name, tensor in tensors.items():
                result[name][slot] = tensor
    results = [{name: entries for name, entries in result.items() if entries} for result in results]
    return results[0] if isinstance(to_place, Place) else results


def _slots(state: Sequence[OptimizerState], blocks: Sequence[Blocks]) -> dict[str, tuple[bool, str]]:
    """Return each slot's kind: whether a parameter has one element of the slot, and the dtype."""
    slots: dict[str, tuple[bool, str]] = {}
    for chunk, local in zip(state, blocks, strict=True):
        for name, entries in chunk.items():
            if name not in local:
                raise ValueError(f"the optimizer has state for {name}, which the layout does not have at this place")
            for slot, tensor in entries.items():
                is_scalar = tuple(tensor.shape) != local[name].shape
                if is_scalar and tensor.numel() != 1:
                    raise ValueError(
                        f"{name}'s {slot} has shape {tuple(tensor.shape)}; it must be the parameter's "
                        f"{local[name].shape}, or one element"
                    )
                # A parameter of one element says nothing about the slot's kind.
                if not is_scalar and tensor.numel() == 1 and slot in slots:
                    continue
                slots[slot] = (is_scalar, str(tensor.dtype).removeprefix("torch."))
    return slots


def _redistribute_scalars(
    slot: str,
    values: Sequence[Mapping[str, Tensor]],
    blocks: Sequence[Blocks],
    to_blocks: Sequence[Blocks],
    dtype: str,
    group: ProcessGroup | None,
) -> list[dict[str, Tensor]]:
    own = [
        (source, tensor.item())
        for chunk, local in zip(values, blocks, strict=True)
        for name, tensor in chunk.items()
        for source in local[name].names
    ]
    merged: dict[str, float] = {}
    for rank, message in enumerate(all_gather_json(own, group)):
        for source, value in message:
            if merged.setdefault(source, value) != value:
                raise ValueError(
                    f"the {slot} of {source} is {merged[source]} on one rank and {value} on rank {rank}; its copies "
                    "must have taken the same steps"
                )

    def fuse(chunk: Blocks) -> dict[str, Tensor]:
        result = {}
        for name, block in chunk.items():
            found = {merged[source] for source in block.names if source in merged}
            if len(found) > 1:
                raise ValueError(f"the {slot} of the tensors fused in {name} differ: {sorted(found)}")
            if found:
                result[name] = torch.tensor(found.pop(), dtype=getattr(torch, dtype))
        return result

    return agree(lambda: [fuse(chunk) for chunk in to_blocks], group)


def _held_blocks(layout: Layout, place: Place, holdings: Holdings) -> dict[str, Block]:
    return {
        name: block
        for name, block in layout.at(place).items()
        if all(source in holdings.dtypes for source in block.names)
    }


def _check_same_model(layout: Layout, to_layout: Layout) -> None:
    for name, canonical in layout.canonical.items():
        other = to_layout.canonical.get(name)
        if other is None or other.shape != canonical.shape:
            there = "is not in the other layout" if other is None else f"has shape {other.shape} in the other layout"
            raise ValueError(f"the layouts are of different models: {name} {canonical.shape} {there}")
    extra = [name for name in to_layout.canonical if name not in layout.canonical]
    if extra:
        raise ValueError(f"the layouts are of different models: only the second has {extra[:3]}")
