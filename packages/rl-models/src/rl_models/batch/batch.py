"""A batch of ragged sequences with named numbers per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from parallel_layers.head import SamplingMask
from rl_models.batch.rows import are_integers, cat_rows, sequence_ids
from rl_models.batch.visual import Visual, VisualInputs


@dataclass(frozen=True)
class Batch:
    """N sequences, one after another, and tensors aligned with their T tokens, without padding.

    A number per token belongs to the token at its position: `log_probs[t]` is log p(token t | the tokens before it),
    `values[t]` the value of the state before token t. Both are 0 for the first token of a sequence.

    Attributes:
        tokens: `[T]` int64.
        lengths: The lengths of the N sequences; 0 is allowed.
        mask: `[T]` bool, the tokens that the policy chose and a loss averages over. The first token of a sequence has
            no probability and cannot be in the mask.
        fields: Further `[T]` or `[T, ...]` tensors by name; `batch["advantages"]` reads one. The field `routing`
            `[T, M, k]` holds the experts to replay, see `Worker.predict`. The fields `pair` and `group` hold a number
            for each sequence, repeated at its tokens: sequences of one pair stay in one micro-batch, sequences of one
            pair or group on one data-parallel rank.
        sampling_mask: For each token the ids that it was drawn from, where a truncated draw chose it; rows without ids
            elsewhere. Log-probs and entropies of such a batch are those of the distribution over these ids, and 0 for
            tokens without (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). None: of the whole vocabulary.
        visual: The images and videos of each of the N sequences, None for a sequence without; empty if there are none.
            They stay with their sequence, and on the CPU.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    mask: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    visual: Visual = ()
    sampling_mask: SamplingMask | None = None

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
            if tensor.shape[:1] != self.tokens.shape or (name in ("mask", "pair", "group") and tensor.dim() > 1):
                raise ValueError(f"{name} must be [{len(self.tokens)}] like the tokens, got {list(tensor.shape)}")
        if self.sampling_mask is not None and len(self.sampling_mask) != len(self.tokens):
            raise ValueError(
                f"sampling_mask must have {len(self.tokens)} rows, one for each token, not {len(self.sampling_mask)}"
            )
        wrong = self.mask & self.first
        if bool(wrong.any()):  # one wait for the device, for all sequences
            raise ValueError(
                f"the first token of sequences {self.sequence_ids[wrong].tolist()} is in the mask and has no token "
                "before it; leave it out"
            )
        object.__setattr__(self, "fields", dict(self.fields))
        visual = tuple(self.visual)
        if not all(isinstance(images, VisualInputs | None) for images in visual) or len(visual) not in (0, len(self)):
            raise ValueError(
                f"visual must be one VisualInputs or None for each of the {len(self)} sequences, got "
                f"{[type(images).__name__ for images in visual][:8]}"
            )
        object.__setattr__(self, "visual", visual if any(visual) else ())

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Tensor | Sequence[int]],
        *,
        response_lengths: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        visual: Visual = (),
        sampling_mask: SamplingMask | None = None,
        **fields: Sequence[Tensor | Sequence[float]],
    ) -> Batch:
        """Concatenate sequences of token ids to a batch.

        Args:
            sequences: N tensors `[L_i]` or lists of token ids.
            response_lengths: The number of last tokens of each sequence in the mask (default: all but the first token).
            device: The device of the batch (default: the device of the sequences).
            visual: The images and videos of each sequence, see `VisualInputs`.
            sampling_mask: The ids that the tokens of all sequences were drawn from.
            **fields: N tensors `[L_i]` or lists of numbers, by name.

        Raises:
            ValueError: A sequence is no row of integers, or a field or a response does not fit its sequence.
        """
        rows = [row.to(device) for row in token_rows(sequences, "sequence")]
        lengths = tuple(len(row) for row in rows)
        if response_lengths is None:
            response_lengths = [max(length - 1, 0) for length in lengths]
        if len(response_lengths) != len(rows):
            raise ValueError(f"{len(response_lengths)} response lengths for {len(rows)} sequences; give one for each")
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
            tensors = [torch.as_tensor(value, device=device) for value in values]
            if [tensor.shape[:1] for tensor in tensors] != [(length,) for length in lengths]:
                shapes = [list(tensor.shape) for tensor in tensors]
                raise ValueError(
                    f"{name} has the shapes {shapes}; give a number for each token of the sequences, which are of the "
                    f"lengths {list(lengths)}"
                )
            flat[name] = cat_rows(tensors, torch.float32, device)
        tokens = cat_rows(rows, torch.int64, device)
        mask = cat_rows(masks, torch.bool, "cpu").to(tokens.device)
        sampling_mask = None if sampling_mask is None else sampling_mask.to(tokens.device)
        return cls(tokens, lengths, mask, flat, tuple(visual), sampling_mask)

    @classmethod
    def from_pairs(
        cls,
        prompts: Sequence[Tensor | Sequence[int]],
        chosen: Sequence[Tensor | Sequence[int]],
        rejected: Sequence[Tensor | Sequence[int]],
    ) -> Batch:
        """Make a batch of N prompts, each with a preferred and another response, all as token ids.

        Returns:
            2N sequences with the responses in the mask: each prompt with its chosen response, then with its rejected
            one. The field `pair` holds the number of the prompt.

        Raises:
            ValueError: The numbers of prompts and responses differ, or a row is empty or does not hold integers.
        """
        rows = {
            name: token_rows(token_lists, name)
            for name, token_lists in (("prompt", prompts), ("chosen response", chosen), ("rejected response", rejected))
        }
        if len({len(token_lists) for token_lists in rows.values()}) > 1:
            counts = ", ".join(f"{len(token_lists)} {name}s" for name, token_lists in rows.items())
            raise ValueError(f"got {counts}; give a chosen and a rejected response to each prompt")
        for name, token_lists in rows.items():
            if empty := [n for n, row in enumerate(token_lists) if not len(row)]:
                raise ValueError(
                    f"{name}s {empty[:8]} are empty; leave these pairs out, or give each at least one token"
                )
        triples = zip(*rows.values(), strict=True)
        pairs = [(prompt, response) for prompt, *responses in triples for response in responses]
        sequences = [torch.cat(pair) for pair in pairs]
        return cls.from_sequences(
            sequences,
            response_lengths=[len(response) for _, response in pairs],
            pair=[torch.full((len(row),), n // 2, device=row.device) for n, row in enumerate(sequences)],
        )

    @classmethod
    def concatenate(cls, batches: Sequence[Batch]) -> Batch:
        """Concatenate all sequences, with the fields that all batches have.

        Where some batches have the field `routing`, the rows of the others are -1, so that the routers choose. A
        sampling mask has rows without ids for a batch without masked tokens.

        Raises:
            ValueError: There are no batches, or a sampling mask beside masked tokens without one.
        """
        if not batches:
            raise ValueError("concatenate needs at least one batch")
        if routed := [batch["routing"] for batch in batches if "routing" in batch.fields]:
            rows = [routed[0].new_full((batch.num_tokens, *routed[0].shape[1:]), -1) for batch in batches]
            batches = [b.with_fields(**{"routing": r, **b.fields}) for b, r in zip(batches, rows, strict=True)]
        names = set.intersection(*(set(batch.fields) for batch in batches))
        known = any(batch.sampling_mask is not None for batch in batches)
        lacking = [n for n, batch in enumerate(batches) if batch.sampling_mask is None and bool(batch.mask.any())]
        if known and lacking:
            raise ValueError(
                f"batches {lacking} of {len(batches)} have masked tokens without a sampling mask, and others have one; "
                "draw all with keep_sampling_mask, or none"
            )
        masks = [
            batch.sampling_mask or SamplingMask.from_rows([()] * batch.num_tokens, batch.device) for batch in batches
        ]
        return cls(
            torch.cat([batch.tokens for batch in batches]),
            tuple(length for batch in batches for length in batch.lengths),
            torch.cat([batch.mask for batch in batches]),
            {name: torch.cat([batch.fields[name] for batch in batches]) for name in sorted(names)},
            tuple(images for batch in batches for images in batch.visual or (None,) * len(batch)),
            SamplingMask.concatenate(masks) if known else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.fields[name]
        except KeyError:
            names = ", ".join(sorted(self.fields)) or "none"
            raise ValueError(
                f"the batch has no field {name!r} (fields: {names}); add it with batch.with_fields({name}=...)"
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
        is_first = torch.zeros(len(self.tokens), dtype=torch.bool)
        is_first[[start for start, length in zip(self._starts, self.lengths, strict=True) if length]] = True
        return is_first.to(self.device)

    @property
    def masked_counts(self) -> Tensor:
        """`[N]` int64: the number of masked tokens of each sequence."""
        return self.mask.new_zeros(len(self), dtype=torch.int64).index_add(0, self.sequence_ids, self.mask.long())

    @property
    def sequence_ids(self) -> Tensor:
        """`[T]` int64: the number of each token's sequence."""
        return sequence_ids(self.lengths, self.mask)

    @property
    def _starts(self) -> list[int]:
        """The position of each sequence's first token in the batch."""
        return list(accumulate(self.lengths, initial=0))[:-1]

    def with_fields(self, **fields: Tensor) -> Batch:
        """Return the batch with these `[T]` tensors; they replace fields of the same name."""
        return replace(self, fields={**self.fields, **fields})

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return the sequences with these numbers, in this order, with their fields; ValueError outside 0..N-1."""
        numbers = self._numbers(indices)
        positions = self.positions(numbers)
        lengths = tuple(self.lengths[i] for i in numbers)
        visual = tuple(self.visual[i] for i in numbers if self.visual)
        mask = None if self.sampling_mask is None else self.sampling_mask[positions]
        return self._map(lambda tensor: tensor[positions], lengths, visual, mask)

    def positions(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return the positions of the tokens of these sequences in the batch, int64; raises as `select`."""
        starts = self._starts
        ranges = [torch.arange(starts[i], starts[i] + self.lengths[i]) for i in self._numbers(indices)]
        return cat_rows(ranges, torch.int64, "cpu").to(self.device)

    def _numbers(self, indices: Sequence[int] | Tensor) -> list[int]:
        """Return indices, which may be a tensor or an array, as checked integers."""
        tensor = torch.as_tensor(indices)
        if not are_integers(tensor):
            raise ValueError(
                f"the numbers of sequences must be [n] integers, got {list(tensor.shape)} {tensor.dtype}; turn a bool "
                "mask into numbers by mask.nonzero().flatten()"
            )
        numbers: list[int] = tensor.tolist()
        if outside := [i for i in numbers if not 0 <= i < len(self)]:
            raise ValueError(
                f"the batch has {len(self)} sequences, and {outside[:8]} are no numbers of sequences; use numbers in "
                f"0..{len(self) - 1}"
            )
        return numbers

    def units(self, *names: str) -> list[int] | None:
        """Return a number for each sequence, from the first of these fields that the batch has; None without a field.

        Each sequence without tokens has a different number below 0.
        """
        name = next((name for name in names if name in self.fields), None)
        if name is None:
            return None
        numbers = iter(self[name][self.first].tolist())
        return [next(numbers) if length else -1 - n for n, length in enumerate(self.lengths)]

    def with_ends(self, labels: Tensor | None = None) -> Batch:
        """Return each sequence with its last token repeated; the mask has the added tokens alone.

        The value at an added token describes the state after the sequence, see `Critic.rewards`. Fields repeat their
        last row; a sampling mask is left out. A sequence without tokens gets the token 0, outside of the mask.

        With `labels` `[T]` (-100: none), as for a process reward model, the mask has the token behind each labelled
        token, whose value describes the state after it, and the field `labels` has the label there.
        """

        def repeat_last(tensor: Tensor) -> Tensor:
            rows = [
                torch.cat([row, row[-1:] if len(row) else row.new_zeros(1, *row.shape[1:])])
                for row in self.split(tensor)
            ]
            return torch.cat(rows) if rows else tensor

        longer = self._map(repeat_last, tuple(length + 1 for length in self.lengths), self.visual)
        if labels is not None:
            behind = torch.cat([labels[:0], *(x for row in self.split(labels) for x in (row.new_tensor([-100]), row))])
            return replace(longer.with_fields(labels=behind), mask=behind != -100)
        is_end = torch.zeros_like(longer.mask)
        is_end[[end - 1 for end, length in zip(accumulate(longer.lengths), self.lengths, strict=True) if length]] = True
        return replace(longer, mask=is_end)

    def split(self, per_token: Tensor | str = "tokens") -> list[Tensor]:
        """Split a `[T, ...]` tensor, or `"tokens"`, `"mask"` or a field by name, into one tensor per sequence."""
        if isinstance(per_token, str):
            tensors = {"tokens": self.tokens, "mask": self.mask}
            per_token = tensors[per_token] if per_token in tensors else self[per_token]
        self._require_per_token(per_token)
        return list(per_token.split(self.lengths)) if self.lengths else []

    def _require_per_token(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or len(tensor) != self.num_tokens:
            raise ValueError(f"expected a tensor [{self.num_tokens}], one row for each token, got {tensor!r:.100}")

    def responses(self) -> list[Tensor]:
        """Return the masked tokens of each sequence."""
        return [tokens[mask] for tokens, mask in zip(self.split(), self.split("mask"), strict=True)]

    def sum_by_sequence(self, per_token: Tensor) -> Tensor:
        """Sum a `[T, ...]` tensor over the masked tokens of each sequence, `[N, ...]`."""
        self._require_per_token(per_token)
        masked = per_token[self.mask]
        return per_token.new_zeros(len(self), *per_token.shape[1:]).index_add(0, self.sequence_ids[self.mask], masked)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; images stay on the CPU."""
        mask = None if self.sampling_mask is None else self.sampling_mask.to(device)
        return self._map(lambda tensor: tensor.to(device), self.lengths, self.visual, mask)

    def _map(
        self,
        change: Callable[[Tensor], Tensor],
        lengths: tuple[int, ...],
        visual: Visual,
        sampling_mask: SamplingMask | None = None,
    ) -> Batch:
        """Return the batch with every tensor per token changed, and another sampling mask."""
        fields = {name: change(tensor) for name, tensor in self.fields.items()}
        return Batch(change(self.tokens), lengths, change(self.mask), fields, visual, sampling_mask)


def require_batch(batch: object) -> None:
    """Raise ValueError unless `batch` is a `Batch`."""
    if isinstance(batch, Batch):
        return
    shape = f" {list(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise ValueError(
        f"expected a Batch, got {type(batch).__name__}{shape}; make one with Batch.from_sequences(...) of one row of "
        "token ids per sequence, without padding: [row[keep] for row, keep in zip(input_ids, attention_mask.bool())]"
    )


def token_rows(sequences: Iterable[Tensor | Sequence[int]] | Batch, name: str) -> list[Tensor]:
    """Return sequences of token ids as int64 tensors `[L]`, each on its device; `name` names a sequence in errors.

    Raises:
        ValueError: `sequences` is a text or a number, or a sequence is a text, a number, rows of numbers, or fractions.
    """
    if isinstance(sequences, Batch):
        return sequences.split()
    encode = "encode texts first: [tokenizer.encode(text) for text in texts]"
    if isinstance(sequences, str | bytes) or not isinstance(sequences, Iterable):
        raise ValueError(
            f"expected one list of token ids for each {name}, got {type(sequences).__name__} {sequences!r:.60}; "
            f"{encode}"
        )
    rows = []
    for n, sequence in enumerate(sequences):
        if isinstance(sequence, str | bytes):
            raise ValueError(f"{name} {n} must be [L] token ids, got the text {sequence!r:.60}; {encode}")
        try:
            ids = torch.as_tensor(sequence)
        except (TypeError, ValueError, RuntimeError) as error:
            type_name = type(sequence).__name__
            raise ValueError(f"{name} {n} must be [L] token ids, got {type_name}: {error}; {encode}") from None
        if not are_integers(ids):
            raise ValueError(f"{name} {n} must be [L] token ids, got {list(ids.shape)} {ids.dtype}")
        rows.append(ids.long())
    return rows
