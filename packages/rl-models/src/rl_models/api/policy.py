"""`Policy`: the interface of an actor for a training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from parallel_models.training import Resumed
from rl_models.api.actor import TokenLogProbs
from rl_models.batch.batch import Batch
from rl_models.calls.passes import PartLoss


class Policy(Protocol):
    """An actor in this process or on other ranks: an `Actor`, or an object that calls one with whole batches.

    Arguments, results and errors: see `Actor`.
    """

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, adapters: bool = True) -> TokenLogProbs:
        """Return the log-probability of every token, and the entropy."""

    def generate(self, prompts: Sequence[Tensor | Sequence[int]] | Batch, **options: Any) -> Batch:
        """Continue every prompt."""

    def update(
        self, batch: Batch, loss: PartLoss, *, temperature: float = 1.0, aggregation: str = "token-mean"
    ) -> dict[str, float]:
        """Take one optimizer step on the batch."""

    def forward_backward(
        self, batch: Batch, loss: PartLoss, *, temperature: float = 1.0, aggregation: str = "token-mean"
    ) -> dict[str, float]:
        """Add the gradient of the loss on the batch."""

    def optimizer_step(self) -> dict[str, float]:
        """Take a step with the sum of the gradients."""

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint."""

    def save_adapter(self, path: str | os.PathLike[str]) -> None:
        """Write the adapters as PEFT does."""

    def save_training(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Write weights, optimizer state, steps taken and random-number states."""

    def wait_for_save(self) -> None:
        """Wait for the save in the background."""

    def load_training(self, path: str | os.PathLike[str], *, step: int | None = None) -> Resumed:
        """Resume from a training checkpoint."""

    def stream_weights(
        self,
        *,
        to: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        format: Literal["fp8"] | None = None,
        device: torch.device | str | None = None,
        bucket_bytes: int = 64 << 20,
        adapter: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `save_pretrained` would write."""

    def offload(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move weights, optimizer state, or both to host memory; return the bytes freed."""

    def onload(self, *, weights: bool = True, optimizer: bool = True) -> None:
        """Bring back the tensors that `offload` has moved."""
