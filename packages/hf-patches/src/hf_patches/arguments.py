"""Labels and temperatures of a call: checked for the whole batch, then cut to what this rank's head computes.

Both are made for whole sequences before they are cut, so the label at a shard's boundary is right.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_patches.batch import BatchPlan
from parallel_layers.data.packing import refuse_unshifted_labels


class Rows(Protocol):
    """Which rows of the hidden states the head takes on this rank, and where their results go."""

    @property
    def count(self) -> int:
        """Rows over all ranks: entries of a result."""
        ...

    @property
    def local(self) -> Tensor | None:
        """Indices of this rank's hidden states; None: all of them, in order."""
        ...

    def take(self, values: Tensor, fill: float) -> Tensor:
        """This rank's part of something with `count` entries; padding gets `fill`."""
        ...

    def collect(self, local: Tensor) -> Tensor:
        """From this rank's results [m, n] to everybody's [count, n]."""
        ...


@dataclass(frozen=True)
class TokenRows:
    """One row for each token."""

    plan: BatchPlan

    @property
    def count(self) -> int:
        """T, as the caller counts."""
        return self.plan.num_given

    @property
    def local(self) -> None:
        """All of them."""
        return None

    def take(self, values: Tensor, fill: float) -> Tensor:
        """Pad [T] to the plan's length and take this rank's part."""
        return self.plan.pad(values, fill)[self.plan.local_tokens]

    def collect(self, local: Tensor) -> Tensor:
        """See `BatchPlan.gather`."""
        return self.plan.gather(local)


def local_labels(labels: Tensor, rows: Rows, vocab_size: int, input_ids: Tensor, shifted: Tensor) -> Tensor:
    """Check all labels on every rank, so that a bad label raises on every rank; return the labels of this rank.

    Values are read on the CPU only, where reading them costs no synchronisation.
    """
    _require_entries("labels", labels, rows)
    if labels.shape == input_ids.shape:
        refuse_unshifted_labels(labels, input_ids, shifted)
    if labels.device.type == "cpu":
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
        if len(wrong):
            raise ValueError(f"label {wrong[0]} is outside the vocabulary of {vocab_size}; use -100 for no label")
    return rows.take(labels, fill=-100)


def local_temperature(temperature: Any, rows: Rows, lengths: Tensor, num_sequences: int) -> float | Tensor:
    """One temperature, one for each row (a tensor), or one for each sequence (a list).

    `lengths` are those of all segments; what follows the `num_sequences` first is padding.
    """
    if isinstance(temperature, Real):
        return float(temperature)
    if isinstance(temperature, Tensor):
        _require_entries("temperature", temperature, rows)
        return rows.take(_checked(temperature), fill=1.0)
    each = [*_one_each(temperature, num_sequences), *[1.0] * (len(lengths) - num_sequences)]
    each_segment = torch.tensor(each, dtype=torch.float32).to(lengths.device)
    return rows.take(each_segment.repeat_interleave(lengths, output_size=rows.count), fill=1.0)


def padded_temperature(temperature: Any, ids_BS: Tensor) -> float | Tensor:
    """One temperature, one for each token (a tensor [B, S]), or one for each row (a list): a number or [B S]."""
    if isinstance(temperature, Real):
        return float(temperature)
    if isinstance(temperature, Tensor):
        return _checked(temperature).flatten()
    each_row = torch.tensor(_one_each(temperature, len(ids_BS)), dtype=torch.float32).to(ids_BS.device)
    return each_row.repeat_interleave(ids_BS.shape[1])


def _one_each(temperatures: Any, num_sequences: int) -> list[float]:
    """The numbers of a list of one positive number for each sequence."""
    try:
        if isinstance(temperatures, str):
            raise TypeError
        each = [float(value) for value in temperatures]
    except (TypeError, ValueError):
        raise ValueError(
            f"temperature={temperatures!r} is neither a number, nor a tensor of one a token, nor a list of one a "
            "sequence; leave it out for 1.0"
        ) from None
    if len(each) != num_sequences:
        raise ValueError(f"got {len(each)} temperatures for {num_sequences} sequences; give one each")
    if not all(value > 0 for value in each):
        raise ValueError(f"temperatures {each} must be positive")
    return each


def _checked(temperature: Tensor) -> Tensor:
    """The tensor, unless it was rounded on its way here, or has an entry that is not positive.

    Its values, as those of labels, are read only on the CPU.
    """
    if temperature.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"temperature arrived as {temperature.dtype}, too coarse for log-probs (FSDP2 casts tensor arguments "
            "when its mixed precision has cast_forward_inputs=True); pass a float, or a list of one a sequence"
        )
    if temperature.device.type == "cpu":
        wrong = temperature[~(temperature > 0)]
        if len(wrong):
            raise ValueError(f"temperature {wrong[0]} of a token must be positive; use 1.0 where it does not matter")
    return temperature


def _require_entries(name: str, value: Tensor, rows: Rows) -> None:
    if not isinstance(value, Tensor) or value.shape != (rows.count,):
        found = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        raise ValueError(f"{name} {found}, the packed batch has {rows.count} tokens; give one a token: [{rows.count}]")


def next_tokens(ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
    """The next token of each row's each token, -100 where either is padding and at the end."""
    labels = torch.full_like(ids_BS, -100)
    labels[:, :-1] = ids_BS[:, 1:]
    if mask_BS is not None:
        mask = mask_BS.bool()
        both = mask & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        labels = labels.masked_fill(~both, -100)
    return labels
