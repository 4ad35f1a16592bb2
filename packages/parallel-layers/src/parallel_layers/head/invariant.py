"""Softmax statistics with the same bits at every tensor-parallel size and in every pack.

The vocabulary is cut at the first entry of every rank in groups of 1, 2, 4, ... `blocks` ranks. The rank that holds a
part computes its statistics in a fixed order, and every rank merges all parts in order.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.head import fused
from parallel_layers.head.chunked import LogitTransform, drop_, merge_statistics, runs, tile_statistics
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.head.vocabulary import check_rows, gather_rows
from parallel_layers.kernels.exact import exact_product
from parallel_layers.linear.invariant import check_blocks

_TILE_LOGITS = 1 << 22
# Triton's layout of a tile, and so the order of sums, depends on whether the number of tokens is a multiple of 16.
_TOKENS_MULTIPLE = 16


def check_invariant(weight_VH: Tensor, vocab_size: int, blocks: int, group: ProcessGroup | None) -> None:
    """Raise ValueError on every rank unless all ranks' rows begin at a cut, in a dtype that has invariant GEMMs."""
    tp, rows = 1 if group is None else group.size(), len(weight_VH)
    check_blocks(blocks, tp)
    check_rows(rows, vocab_size, group, weight_VH.device)
    cuts = _cuts(vocab_size, blocks)
    if wrong := [r for r in range(tp) if min(r * rows, vocab_size) not in cuts]:
        raise ValueError(
            f"at tp={tp} each rank holds {rows} rows, so that rank {wrong[0]} begins at entry {wrong[0] * rows} of "
            f"{vocab_size}, where no rank does at another tp; give each rank ceil({vocab_size} / {tp}) = "
            f"{-(-vocab_size // tp)} rows"
        )
    if weight_VH.dtype == torch.float64:
        raise ValueError("invariant log-probs take float32, bfloat16 or float16, not torch.float64")


def _cuts(vocab_size: int, blocks: int) -> list[int]:
    sizes = [1 << n for n in range(blocks.bit_length())]
    begins = {min(r * -(-vocab_size // tp), vocab_size) for tp in sizes for r in range(tp)}
    return sorted(begins | {vocab_size})


def invariant_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    mask: SamplingMask | None,
    vocab_size: int,
    blocks: int,
    group: ProcessGroup | None,
) -> Tensor:
    """Return the statistics `[4, T]` of the whole vocabulary in fp64.

    `labels_T` and the mask's ids count from this rank's first entry.

    Communication: an all-gather of `[parts of a rank, 4, T]`.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    rows, blocks_of_entries = len(weight_VH), list(pairwise(_cuts(vocab_size, blocks)))
    of_ranks = [[block for block in blocks_of_entries if r * rows <= block[0] < (r + 1) * rows] for r in range(size)]
    padded = hidden_TH.new_zeros(max(map(len, of_ranks)), 4, len(hidden_TH), dtype=torch.float32)
    for slot, (begin, end) in zip(padded, of_ranks[rank], strict=False):
        inside = slice(begin - rank * rows, end - rank * rows)
        kept = None if mask is None else mask.shift(inside.start)
        slot.copy_(_part_statistics(hidden_TH, weight_VH[inside], labels_T - inside.start, transform, kept))
    gathered = gather_rows(padded[None], group).double()
    of_parts = [
        block for statistics, of_rank in zip(gathered, of_ranks, strict=False) for block in statistics[: len(of_rank)]
    ]
    return reduce(lambda left, right: merge_statistics(torch.stack((left, right))), of_parts)


def _part_statistics(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, transform: LogitTransform, mask: SamplingMask | None
) -> Tensor:
    if fused.supports(hidden_TH, weight_VH):
        num_tokens = len(hidden_TH)
        if padding := -num_tokens % _TOKENS_MULTIPLE:
            hidden_TH, labels_T = F.pad(hidden_TH, (0, 0, 0, padding)), F.pad(labels_T, (0, padding), value=-1)
            mask = None if mask is None else mask.pad(num_tokens + padding)
            if isinstance(transform.temperature, Tensor):
                transform = transform._replace(temperature=F.pad(transform.temperature, (0, padding), value=1.0))
        return fused.head_statistics(hidden_TH, weight_VH, labels_T, transform, mask)[:, :num_tokens]
    tiles = []
    for tokens in runs(len(hidden_TH), max(1, _TILE_LOGITS // len(weight_VH))):
        # fp64 hides the order of the sums; see `kernels.exact`.
        logits, _ = transform.apply_(exact_product(hidden_TH[tokens], weight_VH).double(), tokens)
        logits = drop_(logits, mask, tokens, slice(0, len(weight_VH)))
        tiles.append(tile_statistics(logits, labels_T[tokens]).float())
    return torch.cat(tiles, dim=1)
