"""Check labels and temperatures for the whole batch, then cut them to the rows of this rank's head.

Labels are made for whole sequences before the cut, so the label at the boundary of a shard is right.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_patches.batch import BatchPlan
from parallel_layers.data import refuse_unshifted_labels
from parallel_layers.head import SamplingMask


class Rows(Protocol):
    """The rows of the hidden states that the head takes on this rank, and the places of their results."""

    @property
    def count(self) -> int:
        """Return the number of rows over all ranks, which is the number of entries of a result."""
        ...

    @property
    def local(self) -> Tensor | None:
        """Return the indices of this rank's hidden states; None means all of them, in order."""
        ...

    def take(self, values: Tensor, fill: float) -> Tensor:
        """Return this rank's part of a tensor with `count` entries; padding gets `fill`."""
        ...

    def collect(self, local: Tensor) -> Tensor:
        """Gather the results `[m, n]` of each rank into `[count, n]` on every rank."""
        ...


@dataclass(frozen=True)
class TokenRows:
    """The head takes one row for each token."""

    plan: BatchPlan

    @property
    def count(self) -> int:
        """Return T, without the padding of the plan."""
        return self.plan.num_given

    @property
    def local(self) -> None:
        """Return None: the head takes all rows."""
        return None

    def take(self, values: Tensor, fill: float) -> Tensor:
        """Pad `[T]` to the length of the plan and return this rank's part."""
        return self.plan.pad(values, fill)[self.plan.local_tokens]

    def collect(self, local: Tensor) -> Tensor:
        """Gather the results, as `BatchPlan.gather` does."""
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


def local_mask(mask: SamplingMask | None, rows: Rows) -> SamplingMask | None:
    """Return this rank's rows of a sampling mask; None: the whole vocabulary."""
    if mask is None:
        return None
    if not isinstance(mask, SamplingMask):
        raise ValueError(f"sampling_mask is a {type(mask).__name__}; give a parallel_layers.head.SamplingMask")
    numbers = torch.arange(len(mask))
    _require_entries("sampling_mask", numbers, rows)
    return mask[rows.take(numbers, fill=-1)]


def local_temperature(temperature: Any, rows: Rows, lengths: Tensor, num_sequences: int) -> float | Tensor:
    """Return the temperature of each row of this rank: from one number, a tensor with one entry per row, or a list with
    one number per sequence.

    `lengths` holds the lengths of all segments; segments after the first `num_sequences` are padding.
    """
    if isinstance(temperature, Real):
        return float(temperature)
    if isinstance(temperature, Tensor):
        _require_entries("temperature", temperature, rows)
        return rows.take(_checked(temperature), fill=1.0)
    temperatures = [*_one_each(temperature, num_sequences), *[1.0] * (len(lengths) - num_sequences)]
    each_segment = torch.tensor(temperatures, dtype=torch.float32).to(lengths.device)
    return rows.take(each_segment.repeat_interleave(lengths, output_size=rows.count), fill=1.0)


def padded_temperature(temperature: Any, ids_BS: Tensor) -> float | Tensor:
    """Return a number or `[B S]` from one number, a tensor `[B, S]`, or a list with one number per row."""
    if isinstance(temperature, Real):
        return float(temperature)
    if isinstance(temperature, Tensor):
        return _checked(temperature).flatten()
    each_row = torch.tensor(_one_each(temperature, len(ids_BS)), dtype=torch.float32).to(ids_BS.device)
    return each_row.repeat_interleave(ids_BS.shape[1])


def _one_each(temperatures: Any, num_sequences: int) -> list[float]:
    """Return the numbers of a list; raise ValueError unless it holds one positive number per sequence."""
    try:
        if isinstance(temperatures, str):
            raise TypeError
        numbers = [float(value) for value in temperatures]
    except (TypeError, ValueError):
        raise ValueError(
            f"temperature={temperatures!r} is neither a number, nor a tensor with one entry per token, nor a list with "
            "one number per sequence; leave it out for 1.0"
        ) from None
    if len(numbers) != num_sequences:
        raise ValueError(f"got {len(numbers)} temperatures for {num_sequences} sequences; give one for each")
    if not all(value > 0 for value in numbers):
        raise ValueError(f"temperatures {numbers} must be positive")
    return numbers


def _checked(temperature: Tensor) -> Tensor:
    """Return the tensor; refuse 16-bit tensors, and entries that are not positive.

    Values are read on the CPU only, where reading them costs no synchronisation.
    """
    if temperature.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"temperature arrived as {temperature.dtype}, too coarse for log-probs (FSDP2 casts tensor arguments "
            "when its mixed precision has cast_forward_inputs=True); pass a float, or a list with one number for each "
            "sequence"
        )
    if temperature.device.type == "cpu":
        wrong = temperature[~(temperature > 0)]
        if len(wrong):
            raise ValueError(f"temperature {wrong[0]} of a token must be positive; use 1.0 where it does not matter")
    return temperature


def _require_entries(name: str, value: Tensor, rows: Rows) -> None:
    if not isinstance(value, Tensor) or value.shape != (rows.count,):
        problem = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        raise ValueError(
            f"{name} {problem}, the packed batch has {rows.count} tokens; give one entry per token: [{rows.count}]"
        )


def next_tokens(ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
    """Return the next token of each token in each row; -100 at the end of a row and next to padding."""
    labels = torch.full_like(ids_BS, -100)
    labels[:, :-1] = ids_BS[:, 1:]
    if mask_BS is not None:
        mask = mask_BS.bool()
        has_next = mask & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        labels = labels.masked_fill(~has_next, -100)
    return labels
