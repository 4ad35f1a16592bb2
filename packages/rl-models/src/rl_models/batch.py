"""A batch of ragged sequences with named numbers per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from rl_models.losses.sequences import sequence_ids


@dataclass(frozen=True)
class Batch:
    """N sequences, one after another, and tensors aligned with their T tokens, without padding.

    A number per token belongs to the token at its place: `log_probs[t]` is log p(token t | the tokens before it),
    `values[t]` the value of the state before token t. Both are 0 for the first token of a sequence.

    Attributes:
        tokens: `[T]` int64.
        lengths: The lengths of the N sequences; 0 is allowed.
        mask: `[T]` bool, the tokens that the policy chose and a loss averages over. The first token of a sequence has
            no probability and cannot be in the mask.
        fields: Further `[T]` or `[T, ...]` tensors by name; `batch["advantages"]` reads one. The field `routing`
            `[T, M, k]` holds the experts to replay, see `Actor.log_probs`.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    mask: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in {"tokens": self.tokens, "mask": self.mask, **self.fields}.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{name} must be a tensor [T], got {type(tensor).__name__}; use torch.tensor(...), or "
                    f"Batch.from_sequences(..., {name}=[...]) for one list a sequence"
                )
        if self.tokens.dim() != 1 or self.tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be [T] int64, got {list(self.tokens.shape)} {self.tokens.dtype}")
        if sum(self.lengths) != len(self.tokens) or min(self.lengths, default=0) < 0:
            raise ValueError(f"lengths {self.lengths} must be >= 0 and add up to the {len(self.tokens)} tokens given")
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {self.mask.dtype}; use mask.bool()")
        for name, tensor in {"mask": self.mask, **self.fields}.items():
            if tensor.shape[:1] != self.tokens.shape or (name == "mask" and tensor.dim() > 1):
                raise ValueError(f"{name} must be [{len(self.tokens)}] like the tokens, got {list(tensor.shape)}")
        starts = list(self._starts())
        first = self.mask[[start for _, start in starts]]
        if bool(first.any()):  # one wait for the device, for all sequences
            chosen = [n for (n, _), masked in zip(starts, first.tolist(), strict=True) if masked]
            raise ValueError(
                f"the first token of sequences {chosen} is in the mask and has no token before it; leave it out"
            )
        object.__setattr__(self, "fields", dict(self.fields))

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Tensor | Sequence[int]],
        *,
        response_lengths: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        **fields: Sequence[Tensor | Sequence[float]],
    ) -> Batch:
        """Concatenate sequences of token ids to a batch.

        Args:
            sequences: N tensors `[L_i]` or lists of token ids.
            response_lengths: The number of last tokens of each sequence in the mask (default: all but the first token).
            device: The device of the batch (default: that of the sequences).
            **fields: N tensors `[L_i]` or lists of numbers, by name.

        Raises:
            ValueError: A sequence is no row of integers, or a field or a response does not fit its sequence.
        """
        rows = [row.to(device) for row in token_rows(sequences, "sequence")]
        lengths = tuple(len(row) for row in rows)
        if response_lengths is None:
            response_lengths = [max(length - 1, 0) for length in lengths]
        masks = []
        for n, (length, response) in enumerate(zip(lengths, response_lengths, strict=True)):
            if not 0 <= response <= max(length - 1, 0):
                raise ValueError(
                    f"sequence {n} has {length} tokens and a response of {response}; a response has at most all tokens "
                    "but the first"
                )
            masks.append(torch.arange(length) >= length - response)
        flat: dict[str, Tensor] = {}
        for name, values in fields.items():
            parts = [torch.as_tensor(value, device=device) for value in values]
            if tuple(len(part) for part in parts) != lengths:
                raise ValueError(f"{name} has lengths {[len(part) for part in parts]}, the sequences {list(lengths)}")
            flat[name] = _cat(parts, torch.float32, device)
        tokens = _cat(rows, torch.int64, device)
        return cls(tokens, lengths, _cat(masks, torch.bool, "cpu").to(tokens.device), flat)

    @classmethod
    def concatenate(cls, batches: Sequence[Batch]) -> Batch:
        """Concatenate the sequences of all batches, with the fields that all batches have."""
        if not batches:
            raise ValueError("concatenate needs at least one batch")
        names = set.intersection(*(set(batch.fields) for batch in batches))
        return cls(
            torch.cat([batch.tokens for batch in batches]),
            tuple(length for batch in batches for length in batch.lengths),
            torch.cat([batch.mask for batch in batches]),
            {name: torch.cat([batch.fields[name] for batch in batches]) for name in sorted(names)},
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.fields[name]
        except KeyError:
            known = ", ".join(sorted(self.fields)) or "none"
            raise ValueError(
                f"the batch has no field {name!r} (fields: {known}); add it with batch.with_fields({name}=...)"
            ) from None

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all sequences."""
        return len(self.tokens)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tokens.device

    @property
    def first(self) -> Tensor:
        """`[T]` bool: the first token of each sequence."""
        first = torch.zeros(len(self.tokens), dtype=torch.bool)
        first[[start for _, start in self._starts()]] = True
        return first.to(self.device)

    @property
    def masked_counts(self) -> Tensor:
        """`[N]` int64: the number of masked tokens of each sequence."""
        return self.mask.new_zeros(len(self), dtype=torch.int64).index_add(0, self.sequence_ids, self.mask.long())

    @property
    def sequence_ids(self) -> Tensor:
        """`[T]` int64: the number of each token's sequence."""
        return sequence_ids(self.lengths, self.mask)

    def with_fields(self, **fields: Tensor) -> Batch:
        """Return the batch with these `[T]` tensors; they replace fields of the same name."""
        return replace(self, fields={**self.fields, **fields})

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return the sequences with these numbers, in this order, with their fields.

        Raises:
            ValueError: A number is outside 0..N-1.
        """
        numbers = self._numbers(indices)
        where = self.positions(numbers)
        fields = {name: tensor[where] for name, tensor in self.fields.items()}
        return Batch(self.tokens[where], tuple(self.lengths[i] for i in numbers), self.mask[where], fields)

    def positions(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return the places of the tokens of these sequences in the batch, int64; raises as `select`."""
        starts = dict(self._starts(empty=True))
        parts = [torch.arange(starts[i], starts[i] + self.lengths[i]) for i in self._numbers(indices)]
        return _cat(parts, torch.int64, "cpu").to(self.device)

    def _numbers(self, indices: Sequence[int] | Tensor) -> list[int]:
        """Return indices, which may be a tensor or an array, as checked integers."""
        given = torch.as_tensor(indices)
        if given.dim() != 1 or (len(given) and (given.is_floating_point() or given.dtype == torch.bool)):
            raise ValueError(
                f"the numbers of sequences must be [n] integers, got {list(given.shape)} {given.dtype}; turn a bool "
                "mask into numbers by mask.nonzero().flatten()"
            )
        numbers: list[int] = given.tolist()
        if outside := [i for i in numbers if not 0 <= i < len(self)]:
            raise ValueError(
                f"the batch has {len(self)} sequences, and {outside[:8]} are no numbers of sequences; use numbers in "
                f"0..{len(self) - 1}"
            )
        return numbers

    def split(self, per_token: Tensor | str = "tokens") -> list[Tensor]:
        """Split a `[T, ...]` tensor, or `"tokens"`, `"mask"` or a field by name, into one tensor per sequence."""
        if isinstance(per_token, str):
            own = {"tokens": self.tokens, "mask": self.mask}
            per_token = own[per_token] if per_token in own else self[per_token]
        return list(per_token.split(self.lengths)) if self.lengths else []

    def responses(self) -> list[Tensor]:
        """Return the masked tokens of each sequence."""
        return [tokens[mask] for tokens, mask in zip(self.split(), self.split("mask"), strict=True)]

    def sum_by_sequence(self, per_token: Tensor) -> Tensor:
        """Sum a `[T]` tensor over the masked tokens of each sequence, `[N]`."""
        masked = torch.where(self.mask, per_token, 0)
        return masked.new_zeros(len(self)).index_add(0, self.sequence_ids, masked)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        fields = {name: tensor.to(device) for name, tensor in self.fields.items()}
        return Batch(self.tokens.to(device), self.lengths, self.mask.to(device), fields)

    def packed(self, *, multiple_of: int = 1) -> PackedSequence:
        """Return the tokens as a model takes them, padded at the end to a multiple of `multiple_of`."""
        return PackedSequence.from_sequences(self.split(), multiple_of=multiple_of)

    def _starts(self, *, empty: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the number and the first place of each sequence; with `empty` also of sequences without tokens."""
        start = 0
        for n, length in enumerate(self.lengths):
            if length or empty:
                yield n, start
            start += length


def require_batch(batch: object) -> None:
    """Raise ValueError unless `batch` is a `Batch`."""
    if isinstance(batch, Batch):
        return
    shape = f" {list(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise ValueError(
        f"expected a Batch, got {type(batch).__name__}{shape}; make one with Batch.from_sequences(...) of one row of "
        "token ids per sequence, without padding: [row[keep] for row, keep in zip(input_ids, attention_mask.bool())]"
    )


def token_rows(sequences: Iterable[Tensor | Sequence[int]], name: str) -> list[Tensor]:
    """Return sequences of token ids as int64 tensors `[L]`, each on its device; `name` names a sequence in errors.

    Raises:
        ValueError: `sequences` is a text or a number, or one of them is no row of integers.
    """
    if isinstance(sequences, str | bytes) or not isinstance(sequences, Iterable):
        raise ValueError(
            f"expected one list of token ids for each {name}, got {type(sequences).__name__} {sequences!r:.60}; "
            f"{_ENCODE}"
        )
    return [token_ids(sequence, f"{name} {n}") for n, sequence in enumerate(sequences)]


_ENCODE = "encode texts first: [tokenizer.encode(text) for text in texts]"


def token_ids(sequence: Tensor | Sequence[int], name: str) -> Tensor:
    """Return a sequence of token ids, a tensor `[L]` or a list, as int64 on its device; `name` names it in errors.

    Raises:
        ValueError: The sequence is a text, a number, rows of numbers, or fractions.
    """
    if isinstance(sequence, str | bytes):
        raise ValueError(f"{name} must be [L] token ids, got the text {sequence!r:.60}; {_ENCODE}")
    try:
        ids = torch.as_tensor(sequence)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be [L] token ids, got {type(sequence).__name__}: {error}; {_ENCODE}") from None
    if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise ValueError(f"{name} must be [L] token ids, got {list(ids.shape)} {ids.dtype}")
    return ids.long()


def _cat(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=dtype, device=device)
