"""Split a ragged batch into micro-batches with a cap on tokens and balanced work, and pack each micro-batch.

The number of micro-batches is the smallest that the cap, the pipeline schedule and the other data-parallel ranks
allow. The longest-processing-time rule balances the work (Graham 1969: the heaviest micro-batch is at most 4/3 of the
optimum).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.data.packing import PackedSequence
from parallel_layers.device.names import GPU

T = TypeVar("T")


def split_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    units: Sequence[int] | None = None,
    count_multiple_of: int = 1,
    min_count: int = 1,
    group: ProcessGroup | None = None,
) -> list[list[int]]:
    """Split samples into micro-batches of at most `max_tokens` tokens each, with balanced estimated work.

    Args:
        lengths: Tokens of each sample.
        max_tokens: Maximum number of tokens in a micro-batch.
        units: A number for each sample; samples with equal numbers stay in one micro-batch (default: each sample is a
            separate unit).
        count_multiple_of: The number of micro-batches is a multiple of it (for interleaved schedules).
        min_count: Minimum number of micro-batches.
        group: Data-parallel group whose ranks get equally many micro-batches, by one all-reduce of two numbers.

    Returns:
        The increasing sample indices of each micro-batch. If there are more micro-batches than units, the last lists
        are empty: run them as dummies of zero weight, so that the schedule's communication matches.

    Raises:
        ValueError: A unit has more than `max_tokens` tokens or a negative length (on every rank of `group`), or an
            option is below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("count_multiple_of", count_multiple_of), ("min_count", min_count)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    by_unit: dict[int, list[int]] = {}
    for index, unit in enumerate(range(len(lengths)) if units is None else units):
        by_unit.setdefault(unit, []).append(index)
    samples = list(by_unit.values())
    sizes = [_Size.of([lengths[index] for index in unit]) for unit in samples]
    wrong = [n for n, size in enumerate(sizes) if size.tokens > max_tokens or min(lengths[i] for i in samples[n]) < 0]
    bins: list[list[int]] = []
    if not wrong:
        least = max(min_count, math.ceil(sum(lengths) / max_tokens))
        bins = _pack_smallest(sizes, max_tokens, least, count_multiple_of)
    # Exchange before raising: the other ranks would wait for a rank that raised.
    count, wrong_anywhere = len(bins), len(wrong)
    if group is not None and group.size() > 1:
        device = GPU if dist.get_backend(group) == "nccl" else "cpu"
        counts = torch.tensor([count, wrong_anywhere], device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
        count, wrong_anywhere = counts.tolist()
    if wrong_anywhere:
        subject = _described(samples[wrong[0]], lengths) if wrong else "a sample on another rank of the group has"
        raise ValueError(
            f"{subject} more than max_tokens={max_tokens} or less than 0; raise max_tokens or shorten the sample"
        )
    if count > len(bins):
        bins = _pack_smallest(sizes, max_tokens, count, count_multiple_of)
    filled = sorted(sorted(index for unit in chosen for index in samples[unit]) for chosen in bins if chosen)
    return filled + [[] for _ in range(len(bins) - len(filled))]


def restore_order(results: Sequence[Sequence[T]], micro_batches: Sequence[Sequence[int]]) -> list[T]:
    """Return the results of the micro-batches of `split_micro_batches` in the caller's order of samples.

    Results of empty micro-batches are dropped. Raises ValueError if the numbers of results and samples differ.
    """
    if len(results) != len(micro_batches):
        raise ValueError(f"{len(results)} results for {len(micro_batches)} micro-batches; give one for each")
    by_index: dict[int, T] = {}
    for number, (values, indices) in enumerate(zip(results, micro_batches, strict=True)):
        if indices and len(values) != len(indices):
            raise ValueError(f"micro-batch {number} has {len(indices)} samples but {len(values)} results")
        by_index.update(zip(indices, values, strict=False))
    return [by_index[index] for index in range(len(by_index))]


def pack_micro_batches(
    sequences: Sequence[Tensor],
    micro_batches: Sequence[Sequence[int]],
    *,
    multiple_of: int = 1,
    device: torch.device | None = None,
) -> list[PackedSequence]:
    """Pack each micro-batch of a split.

    Args:
        sequences: Token ids `[L_i]` of all samples, in the caller's order.
        micro_batches: The result of `split_micro_batches`.
        multiple_of: The number of tokens of each micro-batch is a multiple of it (tp under sequence parallelism).
        device: The device of dummies on a rank without samples (default: the CPU).

    Returns:
        A packed batch for each micro-batch. An empty micro-batch becomes a dummy of `multiple_of` tokens of padding.
    """
    device = sequences[0].device if len(sequences) else device or torch.device("cpu")
    packed = []
    for members in micro_batches:
        if members:
            group = [sequences[index] for index in members]
            packed.append(PackedSequence.from_sequences(group, multiple_of=multiple_of))
        else:
            packed.append(pad_to(PackedSequence.from_sequences([]).to(device), multiple_of))
    return packed


def pad_to(packed: PackedSequence, num_tokens: int) -> PackedSequence:
    """Return the same batch padded to `num_tokens`, at least its number of tokens; all padding is one last segment."""
    num_added = num_tokens - packed.num_tokens
    if num_added < 0:
        raise ValueError(f"num_tokens={num_tokens} is less than the batch's {packed.num_tokens}")
    if num_added == 0:
        return packed
    padding = packed.padding + num_added
    num_real = packed.num_tokens - packed.padding
    bounds = packed.cu_seqlens[: packed.num_sequences + 1]
    added, axes = torch.arange(padding, device=bounds.device), packed.rotary_positions
    keys = packed.shared_keys
    return dataclasses.replace(
        packed,
        input_ids=F.pad(packed.input_ids, (0, num_added)),
        position_ids=torch.cat([packed.position_ids[:num_real], added]),
        rotary_positions=None if axes is None else torch.cat([axes[:, :num_real], added.expand(3, -1)], dim=1),
        cu_seqlens=F.pad(bounds, (0, 1), value=num_tokens),
        max_seqlen=max(packed.max_seqlen, padding),
        padding=padding,
        shared_keys=None if keys is None else keys.with_padding(num_real + added, replaced=packed.padding),
    )


def _described(unit: Sequence[int], lengths: Sequence[int]) -> str:
    if len(unit) == 1:
        return f"sample {unit[0]} has {lengths[unit[0]]} tokens,"
    return f"samples {list(unit)}, which stay together, have {[lengths[index] for index in unit]} tokens,"


class _Size(NamedTuple):
    """The size of a unit: the tokens and the estimated work of its samples.

    Work is counted in units of the linears' work for one token. In a decoder with H = 4096 causal attention takes 2 H L
    FLOPs for each token and layer, the linears about 24 H**2.
    """

    work: float
    tokens: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "_Size":
        return cls(sum(length + 1.0 / (12 * 4096) * length * length for length in lengths), sum(lengths))


def _pack_smallest(sizes: Sequence[_Size], max_tokens: int, least: int, multiple: int) -> list[list[int]]:
    """Pack the units into the smallest number of bins, at least `least` and a multiple of `multiple`."""
    count = math.ceil(least / multiple) * multiple
    while True:
        bins = _place(sizes, max_tokens, count, balance=True) or _place(sizes, max_tokens, count, balance=False)
        if bins is not None:
            return _fill_empty(bins, sizes)
        count += multiple


def _place(sizes: Sequence[_Size], max_tokens: int, count: int, *, balance: bool) -> list[list[int]] | None:
    """Put units, heaviest first, into the lightest bin with room; return None if a unit finds no room.

    Without `balance` take the fullest bin with room, which fits where the lightest does not.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    # (work, units, bin): the number of units spreads units without tokens.
    order: list[tuple[float, ...]] = [(0, 0, number) for number in range(count)]
    for unit, size in sorted(enumerate(sizes), key=lambda entry: -entry[1].work):
        room = [number for number in range(count) if tokens[number] + size.tokens <= max_tokens]
        if not room:
            return None
        number = min(room, key=order.__getitem__)
        bins[number].append(unit)
        tokens[number] += size.tokens
        work, units, _ = order[number]
        order[number] = (work + size.work, units + 1, number) if balance else (-tokens[number], 0, number)
    return bins


def _fill_empty(bins: list[list[int]], sizes: Sequence[_Size]) -> list[list[int]]:
    """Give every empty bin a unit while another bin has two."""
    for empty in (members for members in bins if not members):
        donor = max(bins, key=lambda members: (len(members) > 1, sum(sizes[unit].tokens for unit in members)))
        if len(donor) < 2:
            break
        empty.append(donor.pop())
    return bins
