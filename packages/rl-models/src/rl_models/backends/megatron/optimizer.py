"""Megatron's AdamW as the optimizer of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import megatron_utils.optimizer as megatron_core
from megatron_utils import MegatronGrid
from parallel_models import OptimizerOptions
from parallel_models.optimizers import Optimizer

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MegatronOptimizer(Optimizer):
    """Megatron's AdamW, with fp32 masters of bf16 and fp16 parameters and, for fp16, a dynamic loss scale.

    With `distributed`, masters and moments are divided, and `state` and `load_state` are collective. `chunks` have
    buffers for gradients; `enter` enters Megatron's global state.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        options: OptimizerOptions,
        enter: Callable[[], AbstractContextManager[MegatronGrid]],
        *,
        distributed: bool,
        drop_gradients: Callable[[], None],
    ) -> None:
        self._enter, self._drop_gradients = enter, drop_gradients
        config = megatron_core.OptimizerConfig(
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            clip_grad=options.max_grad_norm if math.isfinite(options.max_grad_norm) else None,
            precision=PRECISIONS[next(chunks[0].parameters()).dtype],  # type: ignore[arg-type]
            distributed=distributed,
        )
        with enter() as megatron:
            self.inner = megatron_core.Optimizer(chunks, megatron, config)
        self._states = megatron_core.ParameterStates(self.inner)

    @property
    def loss_scale(self) -> float | None:
        """The factor of losses before the backward; fp16 alone has one."""
        return self.inner.loss_scale

    @property
    def loss_scale_state(self) -> Mapping[str, float] | None:
        """The state of the loss scale; fp16 alone has one."""
        return self.inner.loss_scale_state

    @loss_scale_state.setter
    def loss_scale_state(self, state: Mapping[str, float] | None) -> None:
        assert state is not None  # the loss scale adapts
        self.inner.loss_scale_state = dict(state)

    def step(self, learning_rate: float) -> float:
        """Clip, step, and drop the gradients; return the norm before clipping, infinity after an overflow of fp16."""
        with self._enter():
            result = self.inner.step(learning_rate)
        self._drop_gradients()
        return math.inf if result.grad_norm is None else result.grad_norm

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter; DTensors if divided."""
        return self._states.state(parameter)

    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter."""
        self._states.load(parameter, state)

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's moments, and its master weights that are not parameters."""
        return self._states.tensors()
