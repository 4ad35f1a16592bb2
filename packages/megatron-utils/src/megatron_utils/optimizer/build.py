"""Megatron-Core's data parallelism and optimizer from typed configs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from megatron_utils.grid import MegatronGrid
from megatron_utils.optimizer.config import OptimizerConfig
from parallel_layers.training import Schedule

LOSS_SCALE_COUNTERS = ("growth_tracker", "hysteresis_tracker")
"""Megatron's names of two counters: steps since the loss scale grew, and overflows until it shrinks."""


def wrap_data_parallel(
    chunks: Sequence[nn.Module],
    grid: MegatronGrid,
    *,
    distributed: bool = False,
    overlap: bool = False,
    bucket_size: int | None = None,
) -> list[DistributedDataParallel]:
    """Wrap a model's chunks: gradients lie in contiguous fp32 buffers and are averaged over data parallelism.

    Args:
        chunks: The chunks of `build_gpt`, with loaded weights.
        grid: The active grid.
        distributed: Reduce-scatter the gradients, for the distributed optimizer (`OptimizerConfig.distributed`).
        overlap: Communicate during the backward.
        bucket_size: Elements per bucket with `overlap`; default: Megatron's choice.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        bucket_size=bucket_size,
    )
    with torch.enable_grad():  # Megatron builds a graph of each parameter to hook its gradient
        return [
            DistributedDataParallel(
                get_model_config(chunk), options, chunk, disable_bucketing=number > 0, pg_collection=grid.groups
            )
            for number, chunk in enumerate(chunks)
        ]


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return the flat fp32 gradient buffers of wrapped chunks; every `main_grad` is a view into one of them."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers inside a chained optimizer (dense, experts) that have parameters."""
    optimizers = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [
        inner for inner in optimizers if not getattr(inner, "is_stub_optimizer", False) and inner.optimizer is not None
    ]


def get_steps(inner: Any) -> int:
    """Return the number of steps of one of the chained optimizers, as far as this rank knows.

    torch's AdamW counts steps in the state of each parameter. The fused optimizers of Transformer Engine and Apex,
    which Megatron uses if installed, count steps in each group of parameters.
    """
    counts = [group["step"] for group in inner.optimizer.param_groups if "step" in group]
    counts += [entries["step"] for entries in inner.optimizer.state.values() if "step" in entries]
    return int(max(counts, default=0))


def set_steps(inner: Any, step: int, master: Tensor | None = None) -> None:
    """Set the step of one of the chained optimizers, for the parameter with this master weight or for all.

    A fused optimizer has one count per group, which this function sets for any `master`.
    """
    if counts_by_group(inner):
        for group in inner.optimizer.param_groups:
            group["step"] = step
        return
    states = inner.optimizer.state
    for entries in states.values() if master is None else [states[master]]:
        # One tensor each: the update of every parameter would advance a shared tensor.
        entries["step"] = torch.tensor(float(step))


def counts_by_group(inner: Any) -> bool:
    """Return whether one of the chained optimizers counts steps by group instead of by parameter."""
    return not isinstance(inner.optimizer, torch.optim.AdamW | HybridDeviceOptimizer)


class Step(NamedTuple):
    """The result of one optimizer step."""

    grad_norm: float | None
    """Global gradient norm before clipping; None if fp16 overflowed under the loss scale."""
    lr: float
    """Learning rate of the step."""
    skipped: bool
    """Whether the step was skipped for a gradient that is not finite; only the loss scale (fp16) changed."""


class Optimizer:
    """AdamW with a learning-rate schedule over a wrapped model: call `zero_grad`, run a backward, call `step`.

    Args:
        chunks: The chunks of `wrap_data_parallel`.
        grid: The active grid.
        config: The config of the optimizer.
        schedule: The learning-rate schedule; default: constant.

    Raises:
        ValueError: `config.distributed` and the wrapping differ, a parameter's dtype contradicts `config.precision`, or
            all parameters on all ranks are frozen.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        grid: MegatronGrid,
        config: OptimizerConfig,
        schedule: Schedule | None = None,
    ) -> None:
        for chunk in chunks:
            if chunk.ddp_config.use_distributed_optimizer != config.distributed:
                raise ValueError(
                    f"OptimizerConfig.distributed={config.distributed}, but the chunks were wrapped with "
                    f"distributed={chunk.ddp_config.use_distributed_optimizer}; pass the same to both"
                )
            for name, parameter in chunk.module.named_parameters():
                if parameter.dtype not in (config.dtype, torch.float32):
                    raise ValueError(f"{name} is {parameter.dtype}, but precision={config.precision!r}")
        self.chunks = list(chunks)
        self.config = config
        self.schedule = schedule or Schedule()
        self.steps = 0
        """Number of steps taken, without skipped steps."""
        self.skipped = 0
        """Number of steps skipped so far for a gradient that was not finite."""
        self.holds_states = False
        """Whether `ParameterStates.load` has loaded states, so that states exist before the first step."""
        with grid.as_world():
            # Megatron gathers the parameter groups over all ranks of the default group.
            self.inner = get_megatron_optimizer(
                config.to_megatron(),
                self.chunks,
                config.overrides(),
                use_gloo_process_groups=False,
                pg_collection=grid.groups,
            )
        if not self.inner.param_groups:
            raise ValueError("every parameter of the model is frozen; leave requires_grad on for those to be trained")

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return self.config.lr * self.schedule.factor(self.steps)

    def zero_grad(self) -> None:
        """Clear all gradients; call it before the first backward of a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale; pass this method to `run_schedule(grad_scale=...)`."""
        return self.inner.scale_loss(loss)

    @property
    def loss_scale(self) -> float | None:
        """Return the factor of `scale_loss`, or None without a loss scale (fp32, bf16)."""
        scalers = self.scalers()
        return float(scalers[0].scale) if scalers else None

    @property
    def loss_scale_state(self) -> dict[str, float] | None:
        """Return a dynamic loss scale and its counters by Megatron's names, or None without one.

        Set this property to resume a run.
        """
        scalers = self.scalers()
        if not scalers or not isinstance(scalers[0], DynamicGradScaler):
            return None
        state = scalers[0].state_dict()
        return {name: state[name] for name in LOSS_SCALE_COUNTERS} | {"scale": float(state["scale"])}

    @loss_scale_state.setter
    def loss_scale_state(self, state: Mapping[str, float]) -> None:
        for scaler in self.scalers():
            if isinstance(scaler, DynamicGradScaler):
                counters = {name: int(state[name]) for name in LOSS_SCALE_COUNTERS}
                scaler.load_state_dict(counters | {"scale": torch.full_like(scaler.scale, state["scale"])})

    def scalers(self) -> list[Any]:
        """Return the loss scaler of each chained optimizer, including those without parameters on this rank."""
        optimizers = self.inner.chained_optimizers if isinstance(self.inner, ChainedOptimizer) else [self.inner]
        return [scaler for inner in optimizers if (scaler := getattr(inner, "grad_scaler", None)) is not None]

    def _agree_on_loss_scale(self) -> None:
        """Set all loss scales to the smallest: each chained optimizer moves its own scale by its own gradients."""
        scalers = self.scalers()
        if len(scalers) > 1 and isinstance(scalers[0], DynamicGradScaler):
            least = min(scalers, key=lambda scaler: float(scaler.scale)).state_dict()
            for scaler in scalers:
                scaler.load_state_dict(least)

    def step(self, lr: float | None = None) -> Step:
        """Clip, update and advance the schedule; skip and count a step with a gradient that is not finite.

        Args:
            lr: The learning rate of this step only, for a schedule of the caller; None takes the own schedule.
        """
        rate = self.lr if lr is None else lr
        for group in self.inner.param_groups:
            # Megatron's own scheduler sets both at every step; `wd_mult` is 0 for parameters without weight decay.
            group["lr"], group["weight_decay"] = rate, self.config.weight_decay * group["wd_mult"]
        norm: float | None = None
        finite = True
        if self.config.precision != "fp16":
            # Megatron looks for overflows under a loss scale only; without one it would step into NaN.
            self.inner.prepare_grads()
            norm = float(self.inner.get_grad_norm())
            finite = math.isfinite(norm)
        updated, scaled_norm, _ = self.inner.step() if finite else (False, None, None)
        self._agree_on_loss_scale()
        if updated:
            self.steps += 1
            norm = norm if scaled_norm is None else float(scaled_norm)
        else:
            self.skipped += 1
        return Step(norm, rate, not updated)

    def schedule_state(self) -> dict[str, Any]:
        """Return the steps taken and skipped, to save beside the moments that `dist_checkpointing` saves."""
        return {"steps": self.steps, "skipped": self.skipped}

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Continue a saved schedule, with exactly the learning rates of the run that saved it."""
        self.skipped, self.steps = int(state["skipped"]), int(state["steps"])
