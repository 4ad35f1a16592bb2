"""`Engine`: the interface of a backend to `Actor`, `Critic` and `ActorCritic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor, nn

from rl_models.engines.decoding import CacheOptions, Decoding
from rl_models.engines.micro_batch import MicroBatch
from rl_models.engines.optimizer import Optimizer, OptimizerOptions
from rl_models.engines.options import EngineOptions as EngineOptions
from rl_models.engines.shards import Shards
from rl_models.grid import Grid

Role = Literal["causal_lm", "value", "causal_lm_with_value"]

# The outputs of a model after each token of a packed batch, each [T] fp32 with padding: the log-prob of the next token
# of the sequence (0 at its end) and the entropy of that choice, the value of the state, or all three.
Outputs = tuple[Tensor, ...]

# The names of a role's outputs.
OUTPUTS: dict[Role, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "causal_lm_with_value": ("log_probs", "entropy", "values"),
}

# (micro-batch, its outputs) -> scalar
Loss = Callable[[MicroBatch, Outputs], Tensor]


class Engine(Protocol):
    """A loaded model on a grid. Every rank of the grid calls each method, in the same order.

    Ranks that differ in tp, cp or pp alone pass the same micro-batches; data-parallel ranks pass each their own, in
    equal number. After a call a recording replay holds the experts of all tokens and layers, on every rank.

    Attributes:
        module: The parameters of this rank.
        grid: The grid of the model.
        vocab_size: The size of the vocabulary without padding.
        tokens_multiple_of: The tokens of a packed batch must be a multiple of this number.
        micro_batches_multiple_of: The micro-batches of a call must be a multiple of this number.
        routed_layers: The numbers of the layers with routed experts.
        num_experts: The experts of each of these layers; 0 in a dense model.
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

        Every rank of the last pipeline stage calls the loss once for each micro-batch, with whole inputs `[T]`. When
        this method returns, every gradient is complete. The loss must not raise, which would leave other ranks waiting.
        """
        ...

    def drop_gradients(self) -> None:
        """Drop this rank's gradients, also after a call that raised or was interrupted."""
        ...

    def build_optimizer(self, options: OptimizerOptions) -> Optimizer:
        """Return an optimizer of the parameters."""
        ...

    def shards(self) -> Shards:
        """Return the parameters of this rank, as parts of the tensors of a Hugging Face checkpoint."""
        ...

    def decoding(self, options: CacheOptions) -> AbstractContextManager[Decoding]:
        """Generate without gradients; cp ranks may run different forward passes, unless they share experts."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint, atomically."""
        ...


class LoadEngine(Protocol):
    """The signature of each backend's `load`."""

    def __call__(self, path: str, role: Role, grid: Grid, options: EngineOptions) -> Engine:
        """Load the checkpoint at `path`; every rank of the grid calls it."""
        ...
