"""Attention over keys and values in the blocks of a pool.

flash-attn reads the blocks in place. For other backends the visible keys are gathered, at most a given number at a
time.

Shape legend: T tokens of this forward, Q query heads and K key-value heads of this rank, D head size, D' size of a
value head, S segments, B most blocks of a segment, P blocks of the pool, b tokens of a block.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from parallel_layers.attention.backends import HALF, available_backends
from parallel_layers.attention.kernel_interface import Scoring
from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.attention.sinks import out_with_sinks

# Devices and the multiple of tokens in a block that flash-attn 2's paged kernels take.
_DEVICES = frozenset({"cuda"})
_FLASH_BLOCK = 256


class Run(NamedTuple):
    """Segments whose keys are gathered together.

    Attributes:
        tokens: The range of their queries in the forward's tokens.
        rows: The row of each key in the flat pool.
        cu_q: Borders of the segments among the queries.
        cu_k: Borders of the segments among the gathered keys.
        max_q: The most queries of a segment.
        max_k: The most keys of a segment.
    """

    tokens: slice
    rows: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class PagedKeys:
    """The places of the keys of one forward's segments; the same for all its layers.

    Args:
        block_table: `[S, B]` int32, the blocks of each segment's sequence in the order of its tokens, then any numbers.
        block_size: b.
        new: `[S]`, the new tokens of each segment.
        used: `[S]`, the keys of each segment, with new tokens; 0 for padding.
        max_gathered: The most keys of several segments that are gathered together.
    """

    def __init__(
        self, block_table: Tensor, block_size: int, new: Sequence[int], used: Sequence[int], max_gathered: int
    ) -> None:
        self.block_table, self.block_size = block_table, block_size
        self.new, self.used, self.max_gathered = new, used, max_gathered
        self.cu_new, self.cu_used = self._bounds(new), self._bounds(used)
        self._runs: dict[int | None, list[Run]] = {}

    def runs(self, window: int | None) -> list[Run]:
        """Return the segments in runs, with the keys that their queries can see."""
        if window not in self._runs:
            self._runs[window] = list(self._gathered(window))
        return self._runs[window]

    def rows(self, segments: slice, first: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return rows of the flat pool: for each segment those of `counts` tokens from position `first` on."""
        bounds = self._bounds(counts)
        index = torch.arange(sum(counts), device=bounds.device, dtype=torch.int32)
        segment = torch.searchsorted(bounds, index, right=True) - 1
        place = self._int32(first)[segment] + index - bounds[segment]
        block = self.block_table[segments][segment, place // self.block_size]
        return block.long() * self.block_size + place % self.block_size

    def _gathered(self, window: int | None) -> Iterator[Run]:
        # The first new token of a segment sees the window - 1 tokens before it.
        seen = [
            0 if new == 0 else used if window is None else min(used, new + window - 1)
            for new, used in zip(self.new, self.used, strict=True)
        ]
        borders, total = [0], 0
        for n, count in enumerate(seen):
            if n > 0 and total + count > self.max_gathered:
                borders.append(n)
                total = 0
            total += count
        tokens = [0, *accumulate(self.new)]
        for start, stop in pairwise([*borders, len(seen)]):
            new, counts = self.new[start:stop], seen[start:stop]
            first = [used - count for used, count in zip(self.used[start:stop], counts, strict=True)]
            yield Run(
                slice(tokens[start], tokens[stop]),
                self.rows(slice(start, stop), first, counts),
                self._bounds(new),
                self._bounds(counts),
                max(new, default=0),
                max(counts, default=0),
            )

    def _bounds(self, counts: Sequence[int]) -> Tensor:
        return self._int32([0, *accumulate(counts)])

    def _int32(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.block_table.device)


def paged_attention(
    q_TQD: Tensor, key_blocks: Tensor, value_blocks: Tensor, keys: PagedKeys, options: AttentionOptions
) -> Tensor:
    """Compute the attention of each segment's queries to its keys.

    Args:
        q_TQD: `[T, Q, D]`.
        key_blocks: `[P, b, K, D]`.
        value_blocks: `[P, b, K, D']`.
        keys: The places of the keys.
        options: Options of `packed_attention`. The backends "auto" and "flash-attn" read the blocks in place if
            possible (`why_not_in_place`).

    Returns:
        `[T, Q, D']`; zero for queries without keys.
    """
    may_read = len(q_TQD) and options.get("backend", "auto") in ("auto", "flash-attn")
    if may_read and not why_not_in_place(q_TQD, key_blocks, value_blocks):
        return flash_paged_attention(q_TQD, key_blocks, value_blocks, keys, options)
    outs = []
    for run in keys.runs(options.get("window")):
        k, v = (x.flatten(0, 1)[run.rows] for x in (key_blocks, value_blocks))
        options = {**options, "cu_seqlens_k": run.cu_k, "max_seqlen_k": run.max_k}
        outs.append(packed_attention(q_TQD[run.tokens], k, v, run.cu_q, run.max_q, **options))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def why_not_in_place(q_TQD: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> str | None:
    """Return why flash-attn cannot read the blocks in place, or None if it can."""
    block_size, head_dim, value_dim = key_blocks.shape[1], key_blocks.shape[-1], value_blocks.shape[-1]
    if "flash-attn" not in available_backends():
        return "flash-attn is not installed (extra parallel-layers[flash-attn]), or there is no Ampere GPU or newer"
    if q_TQD.device.type not in _DEVICES or q_TQD.dtype not in HALF or q_TQD.dtype != key_blocks.dtype:
        return f"flash-attn takes fp16 or bf16 on CUDA, not {q_TQD.dtype}, {key_blocks.dtype} on {q_TQD.device.type}"
    if block_size % _FLASH_BLOCK:
        return f"flash-attn's blocks are multiples of {_FLASH_BLOCK} tokens, not {block_size}"
    if head_dim > 256 or head_dim % 8 or head_dim != value_dim:
        return f"flash-attn's heads are multiples of 8 up to 256, and the values' alike, not {head_dim} and {value_dim}"
    return None


def flash_paged_attention(
    q_TQD: Tensor, key_blocks: Tensor, value_blocks: Tensor, keys: PagedKeys, options: AttentionOptions
) -> Tensor:
    """Compute `paged_attention` by flash-attn's kernels."""
    from flash_attn import flash_attn_varlen_func  # an optional extra

    scale, sinks = options.get("scale"), options.get("sinks")
    scoring = Scoring(options.get("causal", True), options.get("window"), scale or 0.0, options.get("softcap"))
    found = flash_attn_varlen_func(
        q_TQD,
        key_blocks,
        value_blocks,
        keys.cu_new,
        keys.cu_used,
        max(keys.new),
        max(keys.used),
        softmax_scale=scale,
        causal=scoring.causal,
        window_size=scoring.flash_window,
        softcap=scoring.softcap or 0.0,
        return_attn_probs=sinks is not None,
        block_table=keys.block_table,
    )
    if sinks is None:
        return cast(Tensor, found)
    out, lse, _ = found
    return out_with_sinks(out, lse, sinks).to(out.dtype)
