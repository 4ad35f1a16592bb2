"""`Engine`: what a backend gives to `Actor` and `Critic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from parallel_layers import LogProbs, PackedSequence
from rl_models.grid import Grid

Role = Literal["causal_lm", "value"]

# The tokens that follow what each sequence already has, [L_i] each -> logits [N, V] fp32 after each one's last.
NextLogits = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class EngineOptions:
    """How to load a model.

    Attributes:
        dtype: of the parameters; None: as the checkpoint stores them.
        sequence_parallel: keep `[T/tp, H]` between blocks; None: where the backend has tensor parallelism and tp > 1.
    """

    dtype: torch.dtype | None = None
    sequence_parallel: bool | None = None


class Engine(Protocol):
    """A loaded model on a grid. Per-token results are fp32, in the order of the packed batch, padding included.

    Attributes:
        module: its parameters are trained; after a backward each `.grad` is complete on its tensor-parallel rank.
        grid: where it stands.
        vocab_size: without padding.
        tokens_multiple_of: what the number of tokens of a packed batch must be a multiple of.
    """

    module: nn.Module
    grid: Grid
    vocab_size: int
    tokens_multiple_of: int

    def log_probs(self, packed: PackedSequence, *, temperature: float, entropy: bool) -> LogProbs:
        """Of each token's successor inside its sequence, `[T]`; 0 where there is none."""
        ...

    def values(self, packed: PackedSequence) -> Tensor:
        """Of the state after each token, `[T]`."""
        ...

    def decoding(self, num_sequences: int, max_length: int) -> AbstractContextManager[NextLogits]:
        """Decode up to `num_sequences` sequences of at most `max_length` tokens, without gradients."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint, atomically; every rank of the grid calls it."""
        ...


class LoadEngine(Protocol):
    """The signature of each backend's `load`."""

    def __call__(self, path: str, role: Role, grid: Grid, options: EngineOptions) -> Engine:
        """Load the checkpoint at `path`; every rank of the grid calls it."""
        ...
