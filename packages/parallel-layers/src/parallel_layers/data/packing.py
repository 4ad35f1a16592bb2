"""Packed batches: the sequences of a batch in one run of tokens, with the borders between them.

A batch of sequences of lengths 3, 1, 2, padded to a multiple of 4:

    input_ids    a b c d e f 0 0
    position_ids 0 1 2 0 0 1 0 1
    cu_seqlens   0 3 4 6 8          (padding=2: the last segment is not a sequence)

Layers treat the padding as one more sequence; losses ignore it.

Shape suffixes: B sequences, S padded length, N segments, T tokens, L_i length of sequence i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_layers.data.boundaries import check_boundaries, host_reads

if TYPE_CHECKING:
    from parallel_layers.attention.shared_keys import SharedKeys


@dataclass(frozen=True)
class PackedSequence:
    """Sequences laid end to end.

    Args:
        input_ids: `[T]` int64 token ids.
        position_ids: `[T]` int64 positions; `from_sequences` and `pack` count from 0 in every segment.
        cu_seqlens: `[N+1]` int32: segment i holds the tokens from `cu_seqlens[i]` up to `cu_seqlens[i+1]`.
        max_seqlen: Length of the longest segment.
        padding: Number of tokens of padding at the end; if not 0, they are the last segment.
        rotary_positions: `[3, T]` int64, the positions in time, height and width by which a model with M-RoPE rotates;
            None: `position_ids` on each axis.
        shared_keys: The tokens to which each segment attends (`parallel_layers.data.prefixes`); None: its own.

    Raises:
        ValueError: Other shapes or dtypes, or `padding` outside `0..T`. For `cu_seqlens` on the CPU also: borders that
            do not rise from 0 to T, or do not agree with `max_seqlen` or `padding`. Borders on a GPU are not checked,
            because reading them would wait for the device.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    padding: int = 0
    rotary_positions: Tensor | None = None
    shared_keys: SharedKeys | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("input_ids", torch.int64), ("position_ids", torch.int64), ("cu_seqlens", torch.int32)):
            value = getattr(self, name)
            if value.dim() != 1 or value.dtype != dtype:
                raise ValueError(f"{name} must be 1-D {dtype}, got {value.dim()}-D {value.dtype}")
        if self.position_ids.shape != self.input_ids.shape:
            raise ValueError(f"{self.position_ids.numel()} position_ids for {self.input_ids.numel()} input_ids")
        axes = self.rotary_positions
        if axes is not None and (axes.shape != (3, self.num_tokens) or axes.dtype != torch.int64):
            raise ValueError(
                f"rotary_positions must be [3, {self.num_tokens}] int64: time, height and width of each token; got "
                f"{list(axes.shape)} {axes.dtype}"
            )
        if self.cu_seqlens.numel() < 1 + (self.padding > 0):
            raise ValueError(f"cu_seqlens has {self.cu_seqlens.numel()} entries, too few for padding={self.padding}")
        if not 0 <= self.padding <= self.num_tokens:
            raise ValueError(f"padding={self.padding} is outside 0..{self.num_tokens}")
        check_boundaries(self.cu_seqlens, self.num_tokens, self.max_seqlen)
        if self.padding and host_reads(self.cu_seqlens) and self.padding != (last := self.cu_seqlens.diff()[-1].item()):
            raise ValueError(f"padding={self.padding}, but the last segment has {last} tokens")

    @property
    def num_tokens(self) -> int:
        """Return T, with padding."""
        return self.input_ids.numel()

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences, without the padding segment."""
        return self.cu_seqlens.numel() - 1 - (self.padding > 0)

    @property
    def longest(self) -> int:
        """Return the length of the longest segment together with the tokens that it shares."""
        return self.max_seqlen if self.shared_keys is None else self.shared_keys.max_seqlen

    @property
    def lengths(self) -> list[int]:
        """Return the length of each sequence, without the padding segment; on a GPU this waits for the device."""
        bounds = self.cu_seqlens.tolist()
        return [bounds[i + 1] - bounds[i] for i in range(self.num_sequences)]

    def to(self, device: torch.device | str) -> PackedSequence:
        """Return the same batch on another device."""
        return dataclasses.replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            rotary_positions=None if self.rotary_positions is None else self.rotary_positions.to(device),
            shared_keys=None if self.shared_keys is None else self.shared_keys.to(device),
        )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Tensor], *, multiple_of: int = 1) -> PackedSequence:
        """Pack sequences `[L_i]` of integers and pad the total to a multiple of `multiple_of` with token 0."""
        for i, ids in enumerate(sequences):
            if not isinstance(ids, Tensor):
                raise ValueError(f"sequence {i} must be a tensor of token ids, got {type(ids).__name__}")
            if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
                raise ValueError(f"sequence {i} must be 1-D token ids, got shape {tuple(ids.shape)} of {ids.dtype}")
        device = sequences[0].device if len(sequences) else torch.device("cpu")
        lengths = [ids.numel() for ids in sequences]
        if multiple_of < 1:
            raise ValueError(f"multiple_of={multiple_of} must be at least 1")
        padding = -sum(lengths) % multiple_of
        segments = [*lengths, padding] if padding else lengths
        return cls(
            input_ids=torch.cat(
                [*(ids.long() for ids in sequences), torch.zeros(padding, dtype=torch.int64, device=device)]
            ),
            position_ids=torch.cat([torch.arange(n) for n in [*segments, 0]]).to(device),
            cu_seqlens=torch.tensor([0, *segments]).cumsum(0).int().to(device),
            max_seqlen=max(segments, default=0),
            padding=padding,
        )

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the rows of `values` `[T, ...]` of each sequence, `[L_i, ...]`, without the padding."""
        self._check_rows(values)
        return list(values[: self.num_tokens - self.padding].split(self.lengths))

    def _check_rows(self, values: Tensor) -> None:
        if values.dim() < 1 or values.shape[0] != self.num_tokens:
            raise ValueError(
                f"values of shape {tuple(values.shape)} must have one row for each of {self.num_tokens} tokens"
            )


def pack(input_ids: Tensor, attention_mask: Tensor, *, multiple_of: int = 1) -> PackedSequence:
    """Pack the tokens of `input_ids` `[B, S]` where `attention_mask` `[B, S]` is 1 or True.

    Rows may be padded on the right, on the left, or both. Positions count from 0 at the first kept token of a row.

    Raises:
        ValueError: The shapes differ or are not 2-D, or `multiple_of` is below 1.
    """
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} must both be [B, S]"
        )
    mask = attention_mask.bool()
    return PackedSequence.from_sequences(
        [ids[keep] for ids, keep in zip(input_ids, mask, strict=True)], multiple_of=multiple_of
    )


def unpack(
    values: Tensor,
    packed: PackedSequence,
    attention_mask: Tensor | None = None,
    *,
    padding_value: float = 0.0,
) -> Tensor:
    """Return the rows of `values` `[T, ...]` as `[B, S, ...]`, one row for each sequence.

    Args:
        values: One row for each token of `packed`; gradients flow back to it.
        packed: The batch of `values`.
        attention_mask: `[B, S]`, the mask given to `pack`: values return to the places of their tokens. Without a
            mask, S is the length of the longest sequence, and shorter sequences are padded on the right.
        padding_value: The value at places without a token.

    Raises:
        ValueError: `values` or the mask do not fit the batch.
    """
    packed._check_rows(values)
    if attention_mask is None:
        lengths = torch.tensor(packed.lengths, dtype=torch.int64)
        columns = torch.arange(int(lengths.max()) if len(lengths) else 0)
        mask = (columns < lengths[:, None]).to(values.device)
    else:
        mask = attention_mask.bool()
        counts = mask.sum(1).tolist() if mask.dim() == 2 else None
        if counts != packed.lengths:
            raise ValueError(f"attention_mask keeps {counts} tokens in its rows, the sequences have {packed.lengths}")
    rows = values[: packed.num_tokens - packed.padding]
    return values.new_full((*mask.shape, *values.shape[1:]), padding_value).index_put((mask,), rows)


def next_token_labels(packed: PackedSequence) -> Tensor:
    """Return the next token of each token: `[T]` with `label[t] = input_ids[t + 1]` inside a sequence.

    The last token of each sequence and all padding get -100. Call it on the whole batch, before sharding.
    """
    labels = packed.input_ids.roll(-1)
    if packed.num_tokens:
        # For an empty segment, the index is the end of the segment before, or of the whole batch (-1).
        labels.index_fill_(0, packed.cu_seqlens[1:].long() - 1, -100)
        labels[packed.num_tokens - packed.padding :] = -100
    return labels


def refuse_unshifted_labels(labels: Tensor, input_ids: Tensor, shifted: Tensor) -> None:
    """Raise ValueError for labels that are the input ids, some replaced by -100, which Hugging Face models shift.

    `shifted` are the labels that `next_token_labels` returns. On a GPU only the very same tensor is recognised, because
    reading values would wait for the device.
    """
    unshifted = labels.data_ptr() == input_ids.data_ptr() and labels.numel() > 0
    if not unshifted and labels.device.type == input_ids.device.type == "cpu":
        scored = labels != -100
        # A single label may be any token, and in a run of one token the next token is the same.
        unshifted = int(scored.sum()) > 1 and torch.equal(labels[scored], input_ids[scored])
        unshifted = unshifted and not torch.equal(labels[scored], shifted[scored])
    if unshifted:
        raise ValueError(
            "labels are the input ids: this model does not shift them, so each token would be scored for predicting "
            "itself; leave labels out, or give label[t] = input_ids[t + 1] (parallel_layers.next_token_labels)"
        )
