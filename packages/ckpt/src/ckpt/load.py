"""Loading: each rank reads its own bytes of a Hugging Face checkpoint, straight into its tensors."""

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.agreement import agree
from ckpt.boxio import IOCounter, StagingPool, read_box, view_of
from ckpt.checksums import check_share
from ckpt.folder import Checkpoint, open_checkpoint
from ckpt.layout import Layout
from ckpt.match import Sources, match
from ckpt.pieces import Block, shared, volume
from ckpt.place import Place


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
) -> dict[str, Tensor]:
    """This place's tensors of a checkpoint.

    Every rank checks all headers against the layout, then reads only the bytes that it holds: one contiguous read where
    it holds whole rows, one read a row where it holds columns. Tensors are read in the order of their bytes in the
    files.

    Args:
        path: a folder of safetensors files, or one file.
        layout: from `layout_for`.
        place: this rank's place; None: everything.
        device: where the tensors go.
        dtype: cast to this type; None: as stored.
        into: tensors to fill instead of new ones, by local name (a module's `state_dict()`); device and dtype are then
            theirs.
        group: ranks that load together. With one, an error on any rank is raised on all of them.
        check: compare the whole checkpoint with its recorded checksums first, its tensors divided among the ranks.
        progress: called with the bytes that this rank has read and those it will have read, after each piece.
        counter: is given the bytes and calls of this load.

    Returns:
        Local name -> tensor. Padding is zero. Tensors that the layout has as optional and the checkpoint lacks (a value
        model's `score.*` from a causal-LM checkpoint) are absent.

    Raises:
        ValueError: the checkpoint is broken or does not fit the layout, or `into` does not; names the file or tensor,
            the values and the fix; on every rank of `group`.
    """
    where = Place() if place is None else place
    count = IOCounter() if counter is None else counter

    def prepare() -> tuple[Checkpoint, Sources, dict[str, Block], dict[str, Tensor]]:
        checkpoint = open_checkpoint(path)
        count.header_bytes += checkpoint.header_bytes
        if check:
            check_share(checkpoint, *((0, 1) if group is None else (group.rank(), group.size())))
        sources = match(checkpoint, layout)
        blocks = {name: block for name, block in layout.at(where).items() if _present(block, sources)}
        if into is None:
            tensors = _allocate(checkpoint, layout, sources, blocks, torch.device(device), dtype)
        else:
            tensors = _destinations(blocks, into)
        return checkpoint, sources, blocks, tensors

    checkpoint, sources, blocks, tensors = agree(prepare, group)
    agree(lambda: _read(checkpoint, sources, blocks, tensors, count, progress), group)
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
        if len(stored) > 1 and (kept or dtype is None):
            raise ValueError(
                f"{name} joins tensors of types {sorted(map(str, stored))}; pass dtype= to cast them to one"
            )
        of = stored.pop() if kept or dtype is None else dtype
        tensors[name] = torch.empty(block.shape, dtype=of, device=device)
    return tensors


def _destinations(blocks: dict[str, Block], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    missing = [name for name in blocks if name not in into]
    if missing:
        raise ValueError(
            f"into lacks {', '.join(missing[:3])} ({len(missing)} of {len(blocks)}); it has {list(into)[:3]}..."
        )
    tensors = {name: into[name].detach() for name in blocks}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != blocks[name].shape:
            raise ValueError(f"into[{name!r}] has shape {tuple(tensor.shape)}, the layout has {blocks[name].shape}")
    return tensors


def _read(
    checkpoint: Checkpoint,
    sources: Sources,
    blocks: dict[str, Block],
    tensors: dict[str, Tensor],
    counter: IOCounter,
    progress: Callable[[int, int], None] | None,
) -> None:
    copies = []
    for name, block in blocks.items():
        for piece in block.pieces:
            if piece.is_padding:
                view_of(tensors[name], piece.local_range).zero_()
        for source, copy in shared(block, sources):
            file, info = checkpoint.tensors[source]
            copies.append((file, info, copy, view_of(tensors[name], copy.destination_range)))
    copies.sort(key=lambda entry: (entry[0], entry[1].offset, entry[2].source_range))
    stagings = StagingPool()
    total = sum(volume(copy.source_range) * info.dtype.itemsize for _, info, copy, _ in copies)
    before = counter.data_bytes
    fd, opened = -1, ""
    try:
        for file, info, copy, view in copies:
            if file != opened:
                if fd >= 0:
                    os.close(fd)
                fd, opened = os.open(checkpoint.path / file, os.O_RDONLY | os.O_CLOEXEC), file
            read_box(fd, info, copy.source_range, view, stagings.on(view.device), counter)
            if progress is not None:
                progress(counter.data_bytes - before, total)
    finally:
        if fd >= 0:
            os.close(fd)
