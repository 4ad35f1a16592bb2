"""Forward and backward of a model that is whole on its rank's pipeline: one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from parallel_layers import PackedSequence
from rl_models.engines.engine import Loss, Outputs
from rl_models.engines.fsdp import sync_gradients

Model = Callable[[PackedSequence], Outputs]


def forward_each(model: Model, micro_batches: Sequence[PackedSequence]) -> list[Outputs]:
    """The outputs of every micro-batch, without a graph."""
    with torch.no_grad():
        return [model(packed) for packed in micro_batches]


def backward_each(model: Model, module: nn.Module, micro_batches: Sequence[PackedSequence], loss: Loss) -> None:
    """Add up the gradients of the losses; data-parallel ranks exchange theirs in the last backward alone."""
    for number, packed in enumerate(micro_batches):
        sync_gradients(module, last=number == len(micro_batches) - 1)
        loss(number, model(packed)).backward()
