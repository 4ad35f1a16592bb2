"""`Engine`: what a backend gives to `Actor`, `Critic` and `ActorCritic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor, nn

from rl_models.engines.micro_batch import MicroBatch
from rl_models.engines.optimizer import Optimizer, OptimizerOptions
from rl_models.engines.options import EngineOptions as EngineOptions
from rl_models.engines.shards import Shards
from rl_models.grid import Grid

Role = Literal["causal_lm", "value", "causal_lm_with_value"]

# What a model says after each token of a packed batch, each [T] fp32, padding included: a language model the
# log-probability of the token's successor inside its sequence (0 where there is none) and the entropy of that choice, a
# value model the value of the state, and a model that is both all three.
Outputs = tuple[Tensor, ...]

# The names of a role's outputs.
OUTPUTS: dict[Role, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "causal_lm_with_value": ("log_probs", "entropy", "values"),
}

# (micro-batch, its outputs) -> scalar, of which the gradient is taken.
Loss = Callable[[MicroBatch, Outputs], Tensor]


class NextLogits(Protocol):
    """One step of decoding; see `Engine.decoding`."""

    def __call__(self, tokens: Sequence[Tensor], keep: Sequence[int] | None = None) -> Tensor:
        """Logits `[N, V]` fp32 after each sequence's last token.

        Args:
            tokens: what follows the tokens that each of the N sequences already has, `[L_i]` each, perhaps none; the
                row of a sequence without new tokens is arbitrary.
            keep: before that, go on with these sequences alone, in this order; one that is named several times is
                continued several times. None: with all.
        """
        ...


class Engine(Protocol):
    """A loaded model on a grid. Every rank of the grid calls each method, in the same order.

    A replay that records holds the experts of all tokens and routed layers after a call, on every rank. Ranks that
    differ in tp, cp or pp alone pass the same micro-batches; data-parallel ranks pass each their own, and
    equally many.

    Attributes:
        module: its parameters, as far as this rank holds them.
        grid: where it stands.
        vocab_size: without padding.
        tokens_multiple_of: what the number of tokens of a packed batch must be a multiple of.
        micro_batches_multiple_of: what the number of micro-batches of a call must be a multiple of.
        routed_layers: the numbers of the layers with routed experts; none in a dense model.
        num_experts: of each of these layers; 0 in a dense model.
    """

    module: nn.Module
    grid: Grid
    vocab_size: int
    tokens_multiple_of: int
    micro_batches_multiple_of: int
    routed_layers: Sequence[int]
    num_experts: int

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch, on every rank, without a graph."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the sum of the losses over all micro-batches and all data-parallel ranks.

        The loss is called once for each micro-batch, on the ranks that have its outputs: those of the last pipeline
        stage. All its inputs are whole (`[T]`, also under sequence and context parallelism), so each of these ranks
        computes the same loss. When the call returns, every gradient is complete. A loss that raises on one rank would
        leave the other ranks waiting: the caller gives a loss that keeps its errors until the call is over.
        """
        ...

    def drop_gradients(self) -> None:
        """Drop this rank's gradients, also those of a call that has raised or been interrupted."""
        ...

    def build_optimizer(self, options: OptimizerOptions) -> Optimizer:
        """The optimizer of its parameters."""
        ...

    def shards(self) -> Shards:
        """The parameters of this rank, as parts of the tensors of a Hugging Face checkpoint."""
        ...

    def decoding(self, num_sequences: int, max_length: int) -> AbstractContextManager[NextLogits]:
        """Decode `num_sequences` sequences of at most `max_length` tokens, without gradients."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint, atomically."""
        ...


class LoadEngine(Protocol):
    """The signature of each backend's `load`."""

    def __call__(self, path: str, role: Role, grid: Grid, options: EngineOptions) -> Engine:
        """Load the checkpoint at `path`; every rank of the grid calls it."""
        ...
