"""Labels and temperatures of a call: checked for the whole batch, then cut to what this rank's head computes.

Both are made for whole sequences before they are cut, so the label at a shard's boundary is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_patches.batch import BatchPlan


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


def local_labels(labels: Tensor, rows: Rows, vocab_size: int) -> Tensor:
    """Check all labels on every rank, so that a bad one raises on each, and take this rank's.

    Their values are read only where that costs no synchronisation, on the CPU.
    """
    _require_entries("labels", labels, rows)
    if labels.device.type == "cpu":
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
        if len(wrong):
            raise ValueError(f"label {wrong[0]} is outside the vocabulary of {vocab_size}; use -100 for no label")
    return rows.take(labels, fill=-100)


def local_temperature(
    temperature: float | Sequence[float] | Tensor, rows: Rows, lengths: Tensor, num_sequences: int
) -> float | Tensor:
    """One temperature, one for each row (a tensor), or one for each sequence (a list).

    `lengths` are those of all segments; what follows the `num_sequences` first is padding.
    """
    if isinstance(temperature, (int, float)):
        return float(temperature)
    if isinstance(temperature, Tensor):
        _require_entries("temperature", temperature, rows)
        return rows.take(precise(temperature), fill=1.0)
    if len(temperature) != num_sequences:
        raise ValueError(f"got {len(temperature)} temperatures for {num_sequences} sequences; give one each")
    if not all(value > 0 for value in temperature):
        raise ValueError(f"temperatures {list(temperature)} must be positive")
    each = [*temperature, *[1.0] * (len(lengths) - num_sequences)]
    each_segment = torch.tensor(each, dtype=torch.float32).to(lengths.device)
    return rows.take(each_segment.repeat_interleave(lengths, output_size=rows.count), fill=1.0)


def precise(temperature: Tensor) -> Tensor:
    """The tensor, unless it was rounded on its way here."""
    if temperature.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"temperature arrived as {temperature.dtype}, too coarse for log-probs (FSDP2 casts tensor arguments "
            "when its mixed precision has cast_forward_inputs=True); pass a float, or a list of one a sequence"
        )
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
