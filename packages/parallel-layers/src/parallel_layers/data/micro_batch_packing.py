"""Pack micro-batches: with padding for tensor parallelism, zigzag parts for context parallelism, and dummies.

Shape suffixes: T tokens, L_i length of sequence i.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers import PackedSequence


def pack_micro_batches(
    sequences: Sequence[Tensor],
    micro_batches: Sequence[Sequence[int]],
    *,
    multiple_of: int = 1,
    pad_id: int = 0,
    device: torch.device | None = None,
) -> list[PackedSequence]:
    """Pack each micro-batch of a split.

    Args:
        sequences: Token ids `[L_i]` of all samples, in the caller's order.
        micro_batches: The result of `split_micro_batches`.
        multiple_of: The number of tokens of each micro-batch is a multiple of it (tp under sequence parallelism).
        pad_id: The token of the padding.
        device: The device of dummies on a rank without samples (default: the CPU).

    Returns:
        A packed batch for each micro-batch. An empty micro-batch becomes a dummy of `multiple_of` tokens of padding.
    """
    device = sequences[0].device if len(sequences) else device
    empty = PackedSequence.from_sequences([torch.zeros(0, dtype=torch.int64, device=device)])
    packed = []
    for members in micro_batches:
        if members:
            part = [sequences[index] for index in members]
            packed.append(PackedSequence.from_sequences(part, multiple_of=multiple_of, pad_id=pad_id))
        else:
            none = dataclasses.replace(empty, cu_seqlens=empty.cu_seqlens[:1])
            packed.append(pad_to(none, multiple_of, pad_id=pad_id))
    return packed


def pad_to(packed: PackedSequence, num_tokens: int, *, pad_id: int = 0) -> PackedSequence:
    """Return the same batch padded to `num_tokens`; all padding is one last segment.

    Raises:
        ValueError: The batch has more tokens.
    """
    more = num_tokens - packed.num_tokens
    if more < 0:
        raise ValueError(f"num_tokens={num_tokens} is less than the batch's {packed.num_tokens}")
    if more == 0:
        return packed
    padding = packed.padding + more
    kept = packed.num_tokens - packed.padding
    bounds = packed.cu_seqlens[: packed.num_sequences + 1]
    return PackedSequence(
        input_ids=F.pad(packed.input_ids, (0, more), value=pad_id),
        position_ids=torch.cat([packed.position_ids[:kept], torch.arange(padding, device=bounds.device)]),
        cu_seqlens=F.pad(bounds, (0, 1), value=num_tokens),
        max_seqlen=max(packed.max_seqlen, padding),
        padding=padding,
    )


@dataclasses.dataclass(frozen=True)
class ZigzagBatch:
    """The part of a packed batch on one context-parallel rank.

    Every sequence is padded to a multiple of 2 * tp * cp and cut into 2 * cp equal chunks. Rank r holds the chunks r
    and 2 * cp - 1 - r, so that causal attention is equal work on all ranks.
    """

    input_ids: Tensor
    """`[T / cp]`"""
    position_ids: Tensor
    """`[T / cp]`, positions in the complete sequences."""
    cu_seqlens: Tensor
    """`[N+1]` int32, borders of the complete, padded sequences."""
    max_seqlen: int
    source: Tensor
    """`[T / cp]`, index of each token in the concatenation of the caller's sequences; -1 for padding."""


def pack_zigzag(
    sequences: Sequence[Tensor],
    *,
    tp: int = 1,
    cp: int = 1,
    rank: int = 0,
    pad_id: int = 0,
    device: torch.device | None = None,
) -> ZigzagBatch:
    """Return the part of the sequences `[L_i]` on context-parallel rank `rank`.

    Without sequences the part is empty, on `device` (default: the CPU).

    Raises:
        ValueError: `rank` is not in 0 .. cp - 1.
    """
    if not 0 <= rank < cp:
        raise ValueError(f"rank={rank} is not in 0..{cp - 1}")
    multiple = 2 * tp * cp if cp > 1 else tp
    ids, positions, sources, bounds = [], [], [], [0]
    start = 0
    for sequence in sequences:
        length = len(sequence)
        padded = -(-length // multiple) * multiple
        chunk = padded // (2 * cp)
        places = torch.arange(padded)
        if cp > 1:
            places = torch.cat([places[n * chunk : (n + 1) * chunk] for n in (rank, 2 * cp - 1 - rank)])
        places = places.to(sequence.device)
        real = places < length
        token = sequence[places.clamp(max=length - 1)] if length else sequence
        ids.append(torch.where(real, token, pad_id))
        positions.append(places)
        sources.append(torch.where(real, places + start, -1))
        bounds.append(bounds[-1] + padded)
        start += length
    device = sequences[0].device if len(sequences) else device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return ZigzagBatch(
        input_ids=torch.cat([nothing, *ids]),
        position_ids=torch.cat([nothing, *positions]),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
        max_seqlen=max((b - a for a, b in itertools.pairwise(bounds)), default=0),
        source=torch.cat([nothing, *sources]),
    )


def unpack_zigzag(parts: Sequence[tuple[ZigzagBatch, Tensor]], num_tokens: int) -> Tensor:
    """Return the values `[T / cp, ...]` of all ranks in the order of the concatenated sequences, `[num_tokens, ...]`.

    Raises:
        ValueError: The parts together do not hold each of the `num_tokens` tokens exactly once.
    """
    sources = torch.cat([batch.source for batch, _ in parts])
    values = torch.cat([value for _, value in parts])
    real = sources >= 0
    if sorted(sources[real].tolist()) != list(range(num_tokens)):
        raise ValueError(f"the parts do not hold each of {num_tokens} tokens exactly once; give every rank's part once")
    return values.new_empty(num_tokens, *values.shape[1:]).index_copy(0, sources[real], values[real])
