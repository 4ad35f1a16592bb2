"""Data parallelism, optimizer and schedule of Megatron-Core, from our configs."""

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
from parallel_layers.learning_rate import Schedule

LOSS_SCALE_COUNTERS = ("growth_tracker", "hysteresis_tracker")
"""Megatron's names for the steps since the loss scale grew, and the overflows until it shrinks."""


def wrap_data_parallel(
    chunks: Sequence[nn.Module],
    grid: MegatronGrid,
    *,
    distributed: bool = False,
    overlap: bool = False,
    bucket_size: int | None = None,
) -> list[DistributedDataParallel]:
    """Wrap a model's chunks so that their gradients lie in contiguous fp32 buffers, averaged over data parallelism.

    Args:
        chunks: what `build_gpt` returned, with its weights loaded.
        grid: the active grid.
        distributed: for the distributed optimizer (`OptimizerConfig.distributed`): reduce-scatter the gradients.
        overlap: communicate under the backward.
        bucket_size: elements a bucket, with `overlap`; default Megatron's choice.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        bucket_size=bucket_size,
    )
    with torch.enable_grad():  # it finds where gradients arrive by a graph of each parameter
        return [
            DistributedDataParallel(
                get_model_config(chunk), options, chunk, disable_bucketing=number > 0, pg_collection=None
            )
            for number, chunk in enumerate(chunks)
        ]


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """The memory of the gradients of wrapped chunks: flat fp32 buffers, which every `main_grad` is a view into."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that a chained one consists of (dense, experts), those without parameters left out."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False) and part.optimizer is not None]


def get_steps(part: Any) -> int:
    """Steps that one of the chained optimizers has taken, as far as this rank knows.

    torch's AdamW counts them in the state of each parameter; the fused ones of Transformer Engine and Apex, which
    Megatron takes where they are installed, in each group of parameters.
    """
    counts = [group["step"] for group in part.optimizer.param_groups if "step" in group]
    counts += [entries["step"] for entries in part.optimizer.state.values() if "step" in entries]
    return int(max(counts, default=0))


def set_steps(part: Any, step: int, master: Tensor | None = None) -> None:
    """Go on from `step` in one of the chained optimizers: of the parameter with this master, default all.

    A fused optimizer has one count for a group, which is set whatever `master` is.
    """
    if counts_by_group(part):
        for group in part.optimizer.param_groups:
            group["step"] = step
        return
    states = part.optimizer.state
    for entries in states.values() if master is None else [states[master]]:
        # A tensor of its own: a shared one would be advanced once for each parameter.
        entries["step"] = torch.tensor(float(step))


def counts_by_group(part: Any) -> bool:
    """Whether one of the chained optimizers counts its steps by group and not by parameter."""
    return not isinstance(part.optimizer, torch.optim.AdamW | HybridDeviceOptimizer)


class Step(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float | None
    """Global norm before clipping; None when fp16 overflowed under the loss scale."""
    lr: float
    """The rate that the step used."""
    skipped: bool
    """A gradient is not finite: nothing was changed but the loss scale (fp16), and the schedule stood still."""


class Optimizer:
    """AdamW with its schedule over a wrapped model: `zero_grad`, run a backward, `step`.

    Args:
        chunks: what `wrap_data_parallel` returned.
        grid: the active grid.
        config: of the optimizer.
        schedule: of the learning rate.

    Raises:
        ValueError: `config.distributed` and the wrapping disagree, the parameters have another dtype than
            `config.precision` says, or all of them, on every rank, are frozen.
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
        """Steps taken, skipped ones not counted."""
        self.skipped = 0
        """Steps skipped for a gradient that was not finite so far."""
        self.holds_states = False
        """Whether `ParameterStates.load` has given it states: there are some before the first step."""
        with grid.as_world():
            # It gathers the parameter groups over all ranks.
            self.inner = get_megatron_optimizer(
                config.to_megatron(), self.chunks, config.overrides(), use_gloo_process_groups=False
            )
        if not self.inner.param_groups:
            raise ValueError("every parameter of the model is frozen; leave requires_grad on for those to be trained")

    @property
    def lr(self) -> float:
        """The rate that the next step will use."""
        return self.config.lr * self.schedule.factor(self.steps)

    def zero_grad(self) -> None:
        """Clear every gradient, before the first backward of a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale; `run_schedule(grad_scale=...)` takes this."""
        return self.inner.scale_loss(loss)

    @property
    def loss_scale(self) -> float | None:
        """What `scale_loss` multiplies by; None where there is no loss scale (fp32, bf16)."""
        scalers = self.scalers()
        return float(scalers[0].scale) if scalers else None

    @property
    def loss_scale_state(self) -> dict[str, float] | None:
        """A loss scale that adapts, and how near its next change is, by Megatron's names; None where there is none.

        A run that goes on sets it to what it was.
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
        """The loss scale of each chained optimizer, also of those without parameters on this rank."""
        parts = self.inner.chained_optimizers if isinstance(self.inner, ChainedOptimizer) else [self.inner]
        return [scaler for part in parts if (scaler := getattr(part, "grad_scaler", None)) is not None]

    def _agree_on_loss_scale(self) -> None:
        """One scale for all: each of the chained optimizers moves its own, by what it found in its own gradients."""
        scalers = self.scalers()
        if len(scalers) > 1 and isinstance(scalers[0], DynamicGradScaler):
            least = min(scalers, key=lambda scaler: float(scaler.scale)).state_dict()
            for scaler in scalers:
                scaler.load_state_dict(least)

    def step(self, lr: float | None = None) -> Step:
        """Clip, update and advance the schedule; a step whose gradients are not finite is skipped and counted.

        Args:
            lr: the rate of this step alone, for a schedule that the caller keeps; None: the schedule's.
        """
        rate = self.lr if lr is None else lr
        for group in self.inner.param_groups:
            group["lr"] = rate
        norm: float | None = None
        finite = True
        if self.config.precision != "fp16":
            # Megatron looks for overflows only under a loss scale; without one it would step into NaN.
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

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """(parameters, masters and moments; gradients): what `memory.HostOffload` moves away and what it may drop."""
        kept: list[Tensor] = [parameter.data for chunk in self.chunks for parameter in chunk.parameters()]
        for inner in chained(self.inner):
            kept += [parameter.data for group in inner.optimizer.param_groups for parameter in group["params"]]
            kept += [x for state in inner.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return kept, gradient_buffers(self.chunks)

    def schedule_state(self) -> dict[str, Any]:
        """Where the schedule is: steps taken and steps skipped. (Moments are saved by `dist_checkpointing`.)"""
        return {"steps": self.steps, "skipped": self.skipped}

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Go to where a saved schedule was; rates from here on are exactly those of the run that saved it."""
        self.skipped, self.steps = int(state["skipped"]), int(state["steps"])
