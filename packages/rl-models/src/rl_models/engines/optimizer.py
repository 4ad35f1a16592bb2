"""The optimizer of an engine: its options, and AdamW on the parameters of a module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import clip_grad_norm_
from parallel_layers.learning_rate import Schedule
from parallel_layers.sharding import is_dtensor
from rl_models.numbers import require_number


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), gradient clipping and the schedule.

    Attributes:
        learning_rate: The learning rate of AdamW, which the schedule multiplies.
        betas, eps: The betas and eps of AdamW.
        weight_decay: The decay of matrices; vectors (norms, biases) have none.
        max_grad_norm: Scale the gradient of the whole model down to this norm; infinity: never.
        schedule: The schedule over the optimizer's steps.

    Raises:
        ValueError: A number is out of its range.
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "max_grad_norm"):
            require_number(name, getattr(self, name), finite=False)
        for beta in self.betas:
            require_number("betas", beta, finite=False)
        for name, fits, needs in (
            ("learning_rate", 0 <= self.learning_rate < math.inf, "be finite and not negative"),
            ("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "be two numbers in [0, 1)"),
            ("eps", 0 < self.eps < math.inf, "be finite and above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "be finite and not negative"),
            ("max_grad_norm", self.max_grad_norm > 0, "be above 0; infinity never scales gradients down"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)} must {needs}")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the step that follows `step` completed ones."""
        return self.learning_rate * self.schedule.factor(step)


class Optimizer(Protocol):
    """The optimizer of an engine.

    Attributes:
        loss_scale_state: The loss scale and its counters by name, which a resumed run sets again; None: no loss scale
            that adapts.
    """

    loss_scale_state: Mapping[str, float] | None

    @property
    def loss_scale(self) -> float | None:
        """The factor of losses before the backward, so that small gradients survive in fp16; None: no loss scale.

        `step` divides the gradients by the scale and adapts the scale. A gradient that is not finite lowers the scale
        and skips the step; without a scale it is an error.
        """
        ...

    def step(self, learning_rate: float) -> float:
        """Clip the gradient of the whole model, take a step, and drop the gradients; every rank calls it.

        Returns:
            The norm of the whole model's gradient before clipping, the same on every rank. If it is not finite, no
            parameter and no state has changed.
        """
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of one parameter by slot, empty before the first step.

        Each tensor has the shape of the parameter's part on this rank, or one element.
        """
        ...

    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter that already has its new weights."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the optimizer holds beside the parameters and their gradients."""
        ...


class AdamW:
    """torch's fused AdamW over a module's parameters on this rank, with fp32 state.

    AdamW changes fp32 master weights; a bf16 parameter is its master, rounded after each step, so that small updates
    are not lost. Gradients of bf16 parameters are summed in fp32 over micro-batches. An fp32 parameter is its own
    master. AdamW works elementwise, so the local part of a DTensor is enough.

    Args:
        module: The module, already sharded.
        options: The numbers.
        groups: Every group that divides layers, as for `parallel_layers.clip_grad_norm_`.
        pipeline_group: The ranks that hold other layers.

    Raises:
        ValueError: A parameter is fp16, whose small gradients vanish without a loss scale.
    """

    loss_scale = None
    loss_scale_state: Mapping[str, float] | None = None

    def __init__(
        self,
        module: nn.Module,
        options: OptimizerOptions,
        *,
        groups: Sequence[ProcessGroup | None] = (),
        pipeline_group: ProcessGroup | None = None,
    ) -> None:
        self.module, self.options, self.groups, self.pipeline_group = module, options, groups, pipeline_group
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        if any(parameter.dtype == torch.float16 for _, parameter in named):
            raise ValueError(
                "a model in fp16 needs a loss scale, which only backend='megatron' has: small gradients vanish without "
                "one; load the model with dtype=torch.bfloat16 or torch.float32"
            )
        self._masters = [(parameter, _master(parameter)) for _, parameter in named]
        self._index = {id(parameter): number for number, (parameter, _) in enumerate(self._masters)}
        # The stacked biases of experts are vectors, too.
        matrices = [parameter.dim() > 1 and not name.endswith("bias") for name, parameter in named]
        decayed = [
            {
                "params": [m for (_, m), matrix in zip(self._masters, matrices, strict=True) if matrix is decays],
                "weight_decay": options.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in decayed if group["params"]],
            options.learning_rate,
            options.betas,
            options.eps,
            fused=True,
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Clip, step, and drop the gradients; return the norm before clipping."""
        norm = float(
            clip_grad_norm_(
                self.module, self.options.max_grad_norm, groups=self.groups, pipeline_group=self.pipeline_group
            )
        )
        if math.isfinite(norm):
            self._step(learning_rate)
        self.zero_grad()
        return norm

    def _step(self, learning_rate: float) -> None:
        for parameter, master in self._masters:
            master.grad = None if parameter.grad is None else _local(parameter.grad).to(master.dtype)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in self._masters:
            if parameter.dtype != master.dtype:
                _local(parameter).copy_(master)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter, _ in self._masters:
            parameter.grad = None

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return `step`, `exp_avg`, `exp_avg_sq`, and for a bf16 parameter `master`."""
        master = self._master(parameter)
        if master is None:
            return {}
        slots: dict[str, Tensor] = dict(self.adamw.state.get(master, {}))
        return slots if parameter.dtype == master.dtype else {**slots, "master": master}

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter; without `master` the parameter's value becomes the master."""
        master = self._master(parameter)
        if master is None:
            return
        if parameter.dtype != master.dtype or "master" in state:
            # fp32 parameters are their own master weights, also in a run that was saved in bf16.
            master.copy_(state.get("master", _local(parameter)))
        slots = {name: value for name, value in state.items() if name != "master"}
        self.adamw.state.pop(master, None)
        if slots:
            # Copied: the fused kernel needs the step count on the device, and all slots in fp32.
            self.adamw.state[master] = {
                name: value.detach().to(master.device, torch.float32, copy=True) for name, value in slots.items()
            }

    def _master(self, parameter: Tensor) -> Tensor | None:
        """Return the master weight; None for a frozen parameter."""
        number = self._index.get(id(parameter))
        assert number is not None or not parameter.requires_grad, "the parameters are gathered"
        return None if number is None else self._masters[number][1]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the moments, and the master weights that are not parameters."""
        for parameter, master in self._masters:
            if parameter.dtype != master.dtype:
                yield master
            yield from self.adamw.state.get(master, {}).values()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def _master(parameter: Tensor) -> Tensor:
    if parameter.dtype != torch.bfloat16:
        return _local(parameter)
    if not is_dtensor(parameter):
        # FSDP2 has its own dtype for sums of gradients, see `rl_models.engines.fsdp`.
        parameter.grad_dtype = torch.float32
    return _local(parameter).float()
