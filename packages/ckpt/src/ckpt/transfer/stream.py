"""Stream a sharded live model as full tensors, a bucket at a time, to an inference engine."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.device import GPU, gpu
from ckpt.files.block_fp8 import in_fp8
from ckpt.files.boxio import view_of
from ckpt.layout.adapters import Change
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Box, Piece
from ckpt.layout.place import Place, is_integer
from ckpt.transfer.agreement import agree, require_same
from ckpt.transfer.exchange import BUCKET_BYTES, Bucket, WantedPiece, exchange, plan_moves
from ckpt.transfer.holdings import Tensors, take_stock
from ckpt.transfer.tied import require_equal_copies


def stream_hf(
    tensors: Tensors | Sequence[Tensors],
    layout: Layout,
    group: ProcessGroup | None = None,
    place: Place | Sequence[Place] | None = None,
    *,
    to: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    format: Literal["fp8"] | None = None,
    device: torch.device | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    change: Change | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor), one at a time, in the model's order.

    Collective over `group`: every rank must consume its iterator to the end. Memory: the full tensors of one bucket, at
    least one tensor, beside the two communication buffers. From a GPU to `device="cpu"`: the full tensors of two
    buckets, on the GPU and in pinned memory. The yielded tensors lie in pinned memory: clone a tensor to keep it.

    Args:
        tensors: This rank's tensors by local name, or one mapping for each chunk; DTensors under
            FSDP2.
        layout: From `layout_for`.
        group: The ranks that together hold the model; None: this process alone.
        place: This rank's place, or one for each chunk; None: everything.
        to: Group ranks that receive; the iterators of other ranks yield nothing. None: all ranks receive.
        dtype: Cast floating-point tensors to this dtype.
        format: "fp8": the projections in FP8, each followed by the scales of its blocks, for an engine that holds
            FP8 (`ckpt.files.block_fp8`); stacked experts (gpt-oss) stay as they are. None: plain tensors.
        device: The device of the full tensors; None: the device of the rank's tensors.
        bucket_bytes: The size of one communication, in bytes.
        change: Changes the values of every box before they are sent, such as `AdapterLayout.merging`.

    Raises:
        ValueError: As `save_hf`, differing copies of a tied embedding included; `to` names no rank of the group; on
            every rank.
    """
    size = 1 if group is None else group.size()
    fits = to is None or (isinstance(to, Collection) and all(is_integer(rank) and 0 <= rank < size for rank in to))
    # A text differs from the receivers of every rank whose argument fits.
    receivers: Collection[Any] = range(size) if to is None else sorted(set(to)) if fits else [repr(to)]
    require_same(
        group, layout=layout.fingerprint, to=list(receivers), dtype=dtype, format=format, bucket_bytes=bucket_bytes
    )
    if format not in (None, "fp8"):
        raise ValueError(f"format={format!r} is unknown; use 'fp8', or None for plain tensors")
    if not fits:
        raise ValueError(f"to={to!r:.100} must be ranks of the group, 0 to {size - 1}, such as [0]")
    if not is_integer(bucket_bytes) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} must be a positive number of bytes, such as {BUCKET_BYTES}")
    holdings = dataclasses.replace(take_stock(tensors, layout, place, group), change=change)

    def prepare() -> tuple[list[Bucket], dict[str, torch.dtype]]:
        # The layout keeps the plan for the next stream of the same tensors.
        key = (holdings.key, frozenset(receivers), bucket_bytes)
        if "stream" not in layout.kept or layout.kept["stream"][0] != key:
            wants = (
                (owned, WantedPiece(frozenset(receivers), name, Piece.whole(name, holdings.shapes[name])))
                for name, owned in holdings.assign_owners().items()
            )
            layout.kept["stream"] = key, list(plan_moves(holdings, wants, bucket_bytes))
        return layout.kept["stream"][1], holdings.stored_dtypes(dtype, layout)

    buckets, types = agree(prepare, group)
    require_equal_copies(holdings, layout, group)
    sample = next((tensor for chunk in holdings.chunks for tensor in chunk.tensors.values()), None)
    if device is None:
        device = "cpu" if sample is None else sample.device
    target_device = torch.device(device)
    full: dict[str, Tensor] = {}
    # Parts of a tensor are joined where they are: copies to the host are of whole tensors.
    to_host = sample is not None and sample.device.type == GPU and target_device.type == "cpu"
    assembly = sample.device if sample is not None and to_host else target_device

    def deliver(want: WantedPiece, box: Box, values: Tensor) -> None:
        if want.tensor not in full:
            full[want.tensor] = torch.empty(holdings.shapes[want.tensor], dtype=types[want.tensor], device=assembly)
        view = view_of(full[want.tensor], box)
        view.copy_(values.reshape(view.shape))

    # A block may lie on several ranks: tensors are quantized when they are whole.
    formed = in_fp8 if format == "fp8" else iter
    whole = (
        list(formed((name, full.pop(name)) for name in names))
        for names in exchange(holdings, buckets, group, deliver)
        if holdings.rank in receivers
    )
    for batch in _in_pinned_memory(whole, assembly) if to_host else whole:
        yield from batch


Batch = list[tuple[str, Tensor]]


def _in_pinned_memory(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches of a GPU's tensors as copies in pinned memory, each while the next batch is being copied.

    The copies run on a separate CUDA stream, beside the collectives that fetch the next batch. PyTorch's allocator
    hands pinned memory that the caller has freed to later copies.
    """
    side = gpu.Stream(device)
    pending: tuple[gpu.Event, Batch] | None = None
    for batch in batches:
        side.wait_stream(gpu.current_stream(device))
        copies: Batch = []
        with gpu.stream(side):
            for name, tensor in batch:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append((name, copy.copy_(tensor, non_blocking=True)))
                tensor.record_stream(side)
            copied = side.record_event()
        if pending is not None:
            pending[0].synchronize()
            yield pending[1]
        pending = copied, copies
    if pending is not None:
        pending[0].synchronize()
        yield pending[1]
