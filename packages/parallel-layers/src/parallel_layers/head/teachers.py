"""The forms of a teacher: its head, its most likely tokens, or its log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's hidden states and head. Nothing here gets a gradient."""

    hidden: Tensor
    """`[T, H]`, of the student's tokens, after the final norm, with a hidden size of its own; with
    `sequence_parallel` `[T/tp, H]`."""
    weight: Tensor
    """This rank's rows of the head, `[V, H]`, in the dtype of `hidden`."""
    group: ProcessGroup | None = None
    """The teacher's tensor-parallel group, which may be another group than the student's. Rank r of the group holds the
    rows `r * V ... (r + 1) * V - 1`. All its ranks call forward and backward together, each with the student's tokens
    of that rank."""
    sequence_parallel: bool = False
    """The hidden states are sharded over `group` along the tokens."""
    vocab_size: int | None = None
    """The size of the teacher's vocabulary without padding. Default: all rows; required with several ranks."""
    ids: Tensor | None = None
    """For vocabularies that differ: `[student's vocabulary]` integers, the teacher's id of each of the student's ids,
    -1 for none. Both distributions are normalised over the shared ids alone."""
    temperature: float | Tensor = 1.0
    """A positive number, or a tensor `[T]`."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_softcap: float | None = None
    """Soft-cap of the scaled logits; None for no cap."""

    def part(self, of: Callable[[Tensor], Tensor]) -> TeacherHead:
        """Return the teacher of some tokens: `of` takes them from a tensor `[T, ...]`."""
        rows: dict[str, Any] = {"hidden": of(self.hidden)}
        if isinstance(self.temperature, Tensor) and self.temperature.dim():
            rows["temperature"] = of(self.temperature)
        return replace(self, **rows)


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's log-probs of K tokens, as engines return them; the same on all ranks of the student's group."""

    ids: Tensor
    """`[T, K]` integers, different tokens in a row, in any order; -1 where a row has fewer."""
    log_probs: Tensor
    """`[T, K]`, normalised over the teacher's whole vocabulary, which is the student's; any value for ids of -1."""

    def part(self, of: Callable[[Tensor], Tensor]) -> TeacherTopK:
        """Return the teacher of some tokens, as `TeacherHead.part`."""
        return TeacherTopK(of(self.ids), of(self.log_probs))


@dataclass(frozen=True)
class TeacherSamples:
    """A teacher's log-probs of tokens that the student has drawn; the same on all ranks of the student's group."""

    labels: Tensor
    """`[T]` integers, the drawn tokens; -100 for none."""
    log_probs: Tensor
    """`[T]`, normalised over the teacher's whole vocabulary."""

    def part(self, of: Callable[[Tensor], Tensor]) -> TeacherSamples:
        """Return the teacher of some tokens, as `TeacherHead.part`."""
        return TeacherSamples(of(self.labels), of(self.log_probs))


Teacher = TeacherHead | TeacherTopK | TeacherSamples


@dataclass(frozen=True)
class Distillation:
    """A teacher, and a divergence from it by the names of `linear_distillation`."""

    teacher: Teacher
    divergence: str
    mixture: float | None = None

    def pad(self, length: int) -> Distillation:
        """Return the distillation of `length` tokens; the further tokens have the last token's teacher."""

        def repeated(rows: Tensor) -> Tensor:
            return rows[torch.arange(length, device=rows.device).clamp(max=len(rows) - 1)]

        return replace(self, teacher=self.teacher.part(repeated))
