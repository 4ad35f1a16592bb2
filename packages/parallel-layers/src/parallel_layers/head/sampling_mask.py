"""`SamplingMask`: the tokens that a truncated draw kept, in compressed rows, and the tiles that the head makes of them.

Shape suffixes: T tokens, K ids of all rows, V entries of a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_layers.device.gpus import on_gpu
from parallel_layers.head.vocabulary import IGNORE_INDEX
from parallel_layers.kernels.runtime import has_triton
from parallel_layers.kernels.sampling_mask import label_counts

# Bytes of bits that are expanded at a time, into up to 24 times as many.
_BYTES = 1 << 24
# Ids that are checked at a time.
_IDS = 1 << 25


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that top-k, top-p or min-p kept for each of T draws, any number for each.

    Row t has the ids `ids[offsets[t] : offsets[t + 1]]`, in any order. A row without ids belongs to a token that was
    not drawn. The memory is 4 bytes for each id and 8 for each row.

    Attributes:
        ids: `[K]` int32.
        offsets: `[T + 1]` int64, from 0 to K.

    Raises:
        ValueError: A tensor has another shape or dtype; or, on the CPU, the offsets do not go from 0 to K.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("ids", self.ids, torch.int32), ("offsets", self.offsets, torch.int64)):
            if tensor.dim() != 1 or tensor.dtype != dtype:
                raise ValueError(f"{name} must be one row of {dtype}, got {list(tensor.shape)} {tensor.dtype}")
        if not len(self.offsets) or self.ids.device != self.offsets.device:
            raise ValueError(
                f"{len(self.offsets)} offsets on {self.offsets.device} for ids on {self.ids.device}; give T + 1 "
                "offsets on the device of the ids"
            )
        if self.offsets.device.type == "cpu":
            first, last = self.offsets[[0, -1]].tolist()
            if first != 0 or last != len(self.ids) or bool((self.offsets.diff() < 0).any()):
                raise ValueError(
                    f"offsets go from {first} to {last}; they must rise from 0 to {len(self.ids)}, the number of ids"
                )

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int] | Tensor], device: torch.device | str | None = None
    ) -> SamplingMask:
        """Return the mask with these ids for each token; an empty row for a token that was not drawn."""
        ids = [torch.as_tensor(row, dtype=torch.int32) for row in rows]
        counts = torch.tensor([0, *map(len, ids)], dtype=torch.int64)
        return cls(torch.cat([torch.zeros(0, dtype=torch.int32), *ids]), counts.cumsum(0)).to(device or "cpu")

    @classmethod
    def from_bits(cls, bits_TB: Tensor) -> SamplingMask:
        """Return the mask whose row t has the ids of the set bits of `bits_TB[t]` uint8: bit j of byte b is 8 b + j."""
        parts = bits_TB.split(max(1, _BYTES // max(1, bits_TB.shape[1])))
        return cls.concatenate([_from_bits(part) for part in parts])

    @classmethod
    def concatenate(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the rows of all masks, one mask after another."""
        return cls(torch.cat([mask.ids for mask in masks]), _offsets(torch.cat([mask.counts for mask in masks])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """`[T]` int64: the number of ids of each row."""
        return self.offsets.diff()

    def __getitem__(self, index: slice | Tensor) -> SamplingMask:
        """Return rows: a slice, a bool mask `[T]`, or numbers of rows; -1 gives a row without ids."""
        numbers = torch.arange(len(self), device=self.ids.device)[index] if not _is_numbers(index) else index
        assert isinstance(numbers, Tensor)
        numbers = numbers.to(self.ids.device)
        counts = self.counts[numbers].masked_fill(numbers < 0, 0) if len(self) else numbers.new_zeros(len(numbers))
        offsets = _offsets(counts)
        total = self._total(offsets[-1], len(numbers))
        shifts = self.offsets[numbers] - offsets[:-1]
        columns = torch.arange(total, device=numbers.device) + torch.repeat_interleave(
            shifts, counts, output_size=total
        )
        return SamplingMask(self.ids[columns], offsets)

    def _rows(self, begin: int, length: int) -> Tensor:
        """Return the row `[length]` int64 of each id from number `begin` on."""
        numbers = torch.arange(begin, begin + length, device=self.offsets.device)
        return torch.searchsorted(self.offsets, numbers, right=True) - 1

    def _total(self, offset: Tensor, num_rows: int) -> int:
        """Return the number of ids before an offset; on the meta device the average over rows."""
        return len(self.ids) * num_rows // max(1, len(self)) if offset.is_meta else int(offset)

    def split(self, lengths: Sequence[int]) -> list[SamplingMask]:
        """Return the mask in parts of these numbers of rows."""
        bounds = self.offsets.cpu()
        parts, begin = [], 0
        for length in lengths:
            part = self.offsets[begin : begin + length + 1]
            first, last = bounds[[begin, begin + length]].tolist()
            parts.append(SamplingMask(self.ids[first:last], part - first))
            begin += length
        return parts

    def pad(self, length: int) -> SamplingMask:
        """Return the mask with rows without ids at the end, `length` rows in all."""
        return SamplingMask(self.ids, torch.cat([self.offsets, self.offsets[-1:].expand(length - len(self))]))

    def to(self, device: torch.device | str) -> SamplingMask:
        """Return the mask on a device."""
        return SamplingMask(self.ids.to(device), self.offsets.to(device))

    def tolist(self) -> list[list[int]]:
        """Return the ids of each row."""
        return [ids.tolist() for ids in self.ids.split(self.counts.tolist())]

    def check(self, labels_T: Tensor, vocab_size: int) -> Tensor:
        """Return `[T]` bool, the rows without ids, whose labels have no log-prob.

        Raises:
            ValueError: There is not a row for each label, an id is outside the vocabulary, or a row with ids lacks its
                label (CUDA or compiled: the last two assert on the device).
        """
        if len(self) != len(labels_T) or self.ids.device != labels_T.device:
            raise ValueError(
                f"the sampling mask has {len(self)} rows on {self.ids.device}; give one for each of the "
                f"{len(labels_T)} labels, on {labels_T.device}"
            )
        is_empty = self.counts == 0
        num_labels, num_outside = self._label_counts(labels_T, vocab_size)
        lacking = ~is_empty & (labels_T != IGNORE_INDEX) & (num_labels == 0)
        if on_gpu(labels_T) or torch.compiler.is_compiling():
            torch._assert_async(~lacking.any(), "a row of the sampling mask lacks its label")
            torch._assert_async(num_outside == 0, f"the sampling mask has ids outside 0..{vocab_size - 1}")
        elif not labels_T.is_meta and (bool(lacking.any()) or bool(num_outside)):
            outside = ((self.ids < 0) | (self.ids >= vocab_size)).nonzero()[:, 0]
            row = int(lacking.nonzero()[0]) if lacking.any() else int(self._rows(int(outside[0]), 1))
            first, last = self.offsets[[row, row + 1]].tolist()
            raise ValueError(
                f"the sampling mask lacks the labels of {int(lacking.sum())} rows, and has {int(num_outside)} ids "
                f"outside 0..{vocab_size - 1}, such as row {row} with label {int(labels_T[row])} and ids "
                f"{self.ids[first:last][:8].tolist()}; each token must be one of those that it was drawn from"
            )
        return is_empty

    def _label_counts(self, labels_T: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return how often each row has its label `[T]`, and the number of ids outside the vocabulary."""
        if has_triton(self.ids) and not torch.compiler.is_compiling():
            num_labels, outside_T = label_counts(self.ids, self.offsets, labels_T, vocab_size)
            return num_labels, outside_T.sum()
        num_labels, num_outside = torch.zeros_like(labels_T, dtype=torch.int32), self.offsets.new_zeros(())
        for begin in range(0, len(self.ids), _IDS):
            ids = self.ids[begin : begin + _IDS]
            rows = self._rows(begin, len(ids))
            num_labels.index_add_(0, rows, (ids == labels_T[rows]).int())
            num_outside += ((ids < 0) | (ids >= vocab_size)).sum()
        return num_labels, num_outside

    def shift(self, entries: int) -> SamplingMask:
        """Return the mask whose ids count from the given entry of the vocabulary on."""
        return self if not entries else SamplingMask(self.ids - entries, self.offsets)

    def tile(self, tokens: slice, entries: slice) -> Tensor:
        """Return `[t, v]` bool: the entries that the rows of some tokens keep."""
        begin, end, _ = tokens.indices(len(self))
        size = entries.stop - entries.start
        first = 0 if not begin else self._total(self.offsets[begin], begin)
        last = self._total(self.offsets[end], end)
        ids, rows = self.ids[first:last].long() - entries.start, self._rows(first, last - first) - begin
        kept = torch.zeros(end - begin, size + 1, dtype=torch.bool, device=ids.device)
        # Ids of other tiles go to the last column.
        kept[rows, torch.where((ids >= 0) & (ids < size), ids, size)] = True
        return kept[:, :size]


def _from_bits(bits_TB: Tensor) -> SamplingMask:
    rows, columns = bits_TB.nonzero(as_tuple=True)
    kept = (bits_TB[rows, columns, None] >> torch.arange(8, dtype=torch.uint8, device=bits_TB.device)) & 1
    entry, bit = kept.nonzero(as_tuple=True)
    counts = torch.bincount(rows[entry], minlength=len(bits_TB))
    return SamplingMask((8 * columns[entry] + bit).int(), _offsets(counts))


def _is_numbers(index: slice | Tensor) -> bool:
    return isinstance(index, Tensor) and index.dtype != torch.bool


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
