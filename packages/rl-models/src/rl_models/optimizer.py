"""The optimizer of an engine: its options, and AdamW on the parameters of a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel_layers import clip_grad_norm_


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and gradient clipping.

    Attributes:
        learning_rate, betas, eps: AdamW's.
        weight_decay: of matrices; vectors (norms, biases) are not decayed.
        max_grad_norm: the gradient of the whole model is scaled down to this norm; infinity: never.
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class Optimizer(Protocol):
    """What an engine steps with."""

    def step(self) -> float:
        """Clip the gradient of the whole model, take a step, and drop the gradients; every rank calls it.

        Returns:
            The norm of the whole model's gradient before clipping, the same on every rank. If it is not finite, no
            parameter and no state has changed.
        """
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...


class AdamW:
    """torch's AdamW over the parameters that a module has on this rank.

    Args:
        module: with its parameters where they will be trained (sharded by FSDP2, say).
        options: the numbers.
        groups: every group over which layers are divided, as `parallel_layers.clip_grad_norm_` takes them.
        pipeline_group: the ranks that hold other layers.
    """

    def __init__(
        self,
        module: nn.Module,
        options: OptimizerOptions,
        *,
        groups: Sequence[ProcessGroup | None] = (),
        pipeline_group: ProcessGroup | None = None,
    ) -> None:
        self.module, self.options, self.groups, self.pipeline_group = module, options, groups, pipeline_group
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        decayed = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in decayed if group["params"]], options.learning_rate, options.betas, options.eps
        )

    def step(self) -> float:
        """Clip, step, and drop the gradients; returns the norm before clipping."""
        norm = float(
            clip_grad_norm_(
                self.module, self.options.max_grad_norm, groups=self.groups, pipeline_group=self.pipeline_group
            )
        )
        if math.isfinite(norm):
            self.adamw.step()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none=True)
