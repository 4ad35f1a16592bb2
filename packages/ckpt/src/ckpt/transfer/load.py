"""Load a Hugging Face checkpoint: each rank reads its own bytes, straight into its tensors."""

import os
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import IOCounter, view_of
from ckpt.files.dtypes import check_cast, joined_dtype
from ckpt.files.folder import Checkpoint, open_checkpoint
from ckpt.files.tensor_bytes import check_bytes
from ckpt.files.unchanged import while_unchanged
from ckpt.layout.model_layout import Layout
from ckpt.layout.overlaps import on_this_rank, require_memory
from ckpt.layout.pieces import Block, shared
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, require_same
from ckpt.transfer.match import Sources, match
from ckpt.transfer.parallel_reads import Read, read_all


def load_hf(
    path: str | os.PathLike[str],
    layout: Layout,
    place: Place | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    into: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
    check: bool = False,
    progress: Callable[[int, int], None] | None = None,
    counter: IOCounter | None = None,
    threads: int = 4,
) -> dict[str, Tensor]:
    """Load this place's tensors of a checkpoint.

    Every rank checks all headers against the layout, and a stored head against the embedding that it is tied to. Then
    the rank reads only its own bytes: one contiguous read for whole rows, one read a row for columns. A few threads
    read straight into the tensors, in the order of the bytes in the files. Extra memory: 16 MiB a thread, for tensors
    that are cast or on a GPU.

    Args:
        path: A folder of safetensors files, or one file.
        layout: From `layout_for`.
        place: This rank's place; None: everything.
        device: Where the tensors go.
        dtype: Cast to this type; None: as stored.
        into: Tensors to fill instead of new ones, by local name (a module's `state_dict()`); device and dtype are then
            theirs. For a DTensor this rank's part is read and returned.
        group: The ranks that load together; an error on any rank is raised on all of them.
        check: Compare the whole checkpoint with its recorded checksums first; the ranks divide the tensors.
        progress: Called on the group's first rank with its bytes read so far and its bytes in all.
        counter: Counts the bytes and calls of this load.
        threads: The number of threads that read.

    Returns:
        Local name -> tensor. Padding is zero. Optional tensors that the checkpoint lacks (a value model's `score.*`
        from a causal-LM checkpoint) are absent.

    Raises:
        ValueError: The checkpoint is broken, does not fit the layout or was replaced meanwhile, `into` does not fit, or
            the ranks differ in `layout` or `dtype`; names the file or tensor, the values and the fix; on every rank of
            `group`.
    """
    require_same(group, layout=layout.fingerprint, dtype=dtype)
    where = Place() if place is None else place
    count = IOCounter() if counter is None else counter
    shown = progress if group is None or group.rank() == 0 else None

    def prepare() -> tuple[Checkpoint, Sources, dict[str, Block], dict[str, Tensor]]:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        check_cast(dtype)
        require_memory("device", torch.device(device))
        checkpoint = open_checkpoint(path)
        count.header_bytes += checkpoint.header_bytes
        if check:
            with while_unchanged(checkpoint.files):
                headers = {checkpoint.path / file: header for file, header in checkpoint.headers.items()}
                check_bytes(headers, *((0, 1) if group is None else (group.rank(), group.size())))
        sources = match(checkpoint, layout)
        blocks = {name: block for name, block in layout.at(where).items() if _present(block, sources)}
        if into is None:
            tensors = _allocate(checkpoint, layout, sources, blocks, torch.device(device), dtype)
        else:
            tensors, blocks = _destinations(blocks, into, layout)
        return checkpoint, sources, blocks, tensors

    checkpoint, sources, blocks, tensors = agree(prepare, group)

    def read() -> None:
        _clear_padding(blocks, tensors)
        reads = _reads(checkpoint, sources, blocks, tensors)
        with while_unchanged(checkpoint.files):
            read_all(reads, threads=threads, counter=count, progress=shown)

    agree(read, group)
    return tensors


def _present(block: Block, sources: Sources) -> bool:
    return all(name in sources for name in block.names)


def _allocate(
    checkpoint: Checkpoint,
    layout: Layout,
    sources: Sources,
    blocks: dict[str, Block],
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    tensors = {}
    for name, block in blocks.items():
        stored = {checkpoint.tensors[tensor][1].dtype for source in block.names for tensor, _ in sources[source]}
        kept = any(layout.canonical[source].keep_dtype for source in block.names)
        chosen = joined_dtype(name, stored, None if kept else dtype)
        tensors[name] = torch.empty(block.shape, dtype=chosen, device=device)
    return tensors


def _destinations(
    blocks: dict[str, Block], into: Mapping[str, Tensor], layout: Layout
) -> tuple[dict[str, Tensor], dict[str, Block]]:
    """Return the tensors of `into` to fill (the local parts of DTensors) and their blocks."""
    missing = [name for name in blocks if name not in into]
    if missing:
        raise ValueError(
            f"into lacks {', '.join(missing[:3])} ({len(missing)} of {len(blocks)}); it has {list(into)[:3]}..."
        )
    integers = [name for name in blocks if not into[name].is_floating_point() and not layout.is_carried(blocks[name])]
    if integers:
        raise ValueError(f"into[{integers[0]!r}] is of type {into[integers[0]].dtype}, which cannot hold weights")
    held = {name: on_this_rank(f"into[{name!r}]", into[name], block.shape) for name, block in blocks.items()}
    parts = {name: blocks[name].part(box) for name, (_, box) in held.items()}
    return {name: tensor for name, (tensor, _) in held.items()}, parts


def _reads(
    checkpoint: Checkpoint, sources: Sources, blocks: dict[str, Block], tensors: dict[str, Tensor]
) -> Iterator[Read]:
    for name, block in blocks.items():
        for source, copy in shared(block, sources):
            file, info = checkpoint.tensors[source]
            view = view_of(tensors[name], copy.destination_range)
            yield Read(source, checkpoint.path / file, info, copy.source_range, view)


def _clear_padding(blocks: dict[str, Block], tensors: dict[str, Tensor]) -> None:
    for name, block in blocks.items():
        for piece in block.pieces:
            if piece.is_padding:
                view_of(tensors[name], piece.local_range).zero_()
