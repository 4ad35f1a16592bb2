"""Load a Hugging Face checkpoint: each rank reads its own bytes, straight into its tensors."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.disk import while_unchanged
from ckpt.files.dtypes import check_cast
from ckpt.files.folder import Checkpoint
from ckpt.layout.dtensors import on_this_rank, require_mapping, require_memory
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Piece
from ckpt.layout.place import Place
from ckpt.transfer.agreement import agree, rank_in, require_same
from ckpt.transfer.float8 import float8_reads, require_float8, scales_of
from ckpt.transfer.parallel_reads import Read, read_all
from ckpt.transfer.sources import Openable, open_source
from ckpt.transfer.tensor_files import Source, TensorFiles


def load_hf(
    path: Openable,
    layout: Layout,
    place: Place | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    into: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
    check: bool = False,
    threads: int = 4,
) -> dict[str, Tensor]:
    """Load this place's tensors of a checkpoint.

    Every rank checks all headers against the layout, and a stored head against the embedding that it is tied to. Then
    the rank reads only its own bytes: one contiguous read for whole rows, one read a row for columns. A few threads
    read straight into the tensors, in the order of the bytes in the files. Extra memory: 16 MiB a thread, for tensors
    that are cast or on a GPU.

    Args:
        path: A folder of safetensors files, one file, or a sharded folder of any grid; or an opened checkpoint.
        layout: From `layout_for`.
        place: This rank's place; None: everything.
        device: Where the tensors go.
        dtype: Cast to this type; None: as stored.
        into: Tensors to fill, by local name (a module's `state_dict()`), in their device and dtype; None: new tensors.
            For a DTensor this rank's part is read and returned. A weight `X` beside `X_scale_inv` is filled with FP8
            numbers and the scales of its blocks (`ckpt.transfer.float8`).
        group: The ranks that load together; an error on any rank is raised on all of them.
        check: Compare the whole checkpoint with its recorded checksums first; the ranks divide the tensors.
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

    def prepare() -> tuple[Source, dict[str, Block], dict[str, Tensor]]:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        check_cast(dtype)
        source = open_source(path, layout=layout)
        if check:
            source.check(rank_in(group), 1 if group is None else group.size())
        blocks = layout.at(Place() if place is None else place)
        held = {name: block for name, block in blocks.items() if source.pieces.keys() >= {*block.names}}
        return source, *_tensors_to_fill(source, held, into, dtype, torch.device(device))

    source, blocks, tensors = agree(prepare, group)

    def reads_of(name: str, block: Block) -> Iterator[Read]:
        scales = scales_of(into, name)
        if scales is None:
            return source.reads(tensors[name], block)
        return float8_reads(source, tensors[name], scales, block)

    def read() -> None:
        reads = (read for name, block in blocks.items() for read in reads_of(name, block))
        with while_unchanged(source.files):
            read_all(reads, threads=threads)

    agree(read, group)
    return tensors


def _tensors_to_fill(
    source: Source,
    blocks: dict[str, Block],
    into: Mapping[str, Tensor] | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[dict[str, Block], dict[str, Tensor]]:
    """Return the blocks and the tensors that a load fills: new tensors, or the tensors of `into`."""
    require_memory("device", device)
    if into is None:
        dtypes = {name: source.dtype(block.names, name, dtype) for name, block in blocks.items()}
        return blocks, {n: torch.empty(block.shape, dtype=dtypes[n], device=device) for n, block in blocks.items()}
    require_mapping("into", into)
    in_float8 = [block for name, block in blocks.items() if scales_of(into, name) is not None]
    require_float8(source, [name for block in in_float8 for name in block.names])
    return destinations(blocks, into, source.layout)


def load_blocks(
    checkpoint: Checkpoint,
    blocks: Mapping[str, Block],
    into: Mapping[str, Tensor],
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Fill tensors that are blocks of a checkpoint's tensors; each rank reads its own part of a DTensor.

    This is `load_hf` for a model without a layout. The pieces of the blocks have the names of tensors in the files.

    Args:
        checkpoint: The opened checkpoint.
        blocks: The blocks of whole tensors, by local name.
        into: The tensors to fill, by local name; they are cast to.
        group: See `load_hf`.

    Raises:
        ValueError: A tensor has another shape than its block, or the checkpoint is broken or was replaced meanwhile; on
            every rank of `group`.
    """
    pieces = {name: [(name, Piece.whole(name, shape))] for name, shape in checkpoint.shapes.items()}
    files = TensorFiles(checkpoint.headers, checkpoint.tensors, pieces)

    def reads() -> Iterator[Read]:
        for name, block in blocks.items():
            tensor, box = on_this_rank(name, into[name], block.shape)
            yield from files.reads(tensor, block.part(box))

    def read() -> None:
        with while_unchanged(files.files):
            read_all(reads())

    agree(read, group)


def destinations(
    blocks: dict[str, Block], into: Mapping[str, Tensor], layout: Layout
) -> tuple[dict[str, Block], dict[str, Tensor]]:
    """Return the blocks and the tensors of `into` to fill; for DTensors, their local parts."""
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
    return parts, {name: tensor for name, (tensor, _) in held.items()}
