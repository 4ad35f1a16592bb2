"""Forward and backward of a model without a pipeline, one micro-batch after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rl_models.engines.engine import Loss, Outputs
from rl_models.engines.fsdp import sync_gradients
from rl_models.engines.micro_batch import MicroBatch

Model = Callable[[MicroBatch], Outputs]


def forward_each(model: Model, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
    """Return the outputs of every micro-batch, without a graph."""
    with torch.no_grad():
        return [model(micro_batch) for micro_batch in micro_batches]


def backward_each(model: Model, module: nn.Module, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
    """Sum the gradients of the losses; data-parallel ranks exchange gradients in the last backward."""
    for number, micro_batch in enumerate(micro_batches):
        sync_gradients(module, last=number == len(micro_batches) - 1)
        loss(micro_batch, model(micro_batch)).backward()
