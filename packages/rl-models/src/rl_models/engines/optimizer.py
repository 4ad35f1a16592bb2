"""The optimizer of an engine: its options, and AdamW on the parameters of a module."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
        require_number("learning_rate", self.learning_rate, at_least=0)
        require_number("weight_decay", self.weight_decay, at_least=0)
        require_number("eps", self.eps, positive=True)
        require_number("max_grad_norm", self.max_grad_norm, positive=True, finite=False)
        for beta in self.betas:
            require_number("betas", beta, finite=False)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in [0, 1)")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the step that follows `step` completed ones."""
        return self.learning_rate * self.schedule.factor(step)


class Optimizer(ABC):
    """The optimizer of an engine.

    A resumed run sets `loss_scale_state` again, the loss scale and its counters; None: no loss scale that adapts.
    """

    loss_scale_state: Mapping[str, float] | None = None

    @property
    def loss_scale(self) -> float | None:
        """The factor of losses before the backward, so that small gradients survive in fp16; None: no loss scale.

        `step` divides the gradients by the scale. A gradient that is not finite lowers the scale and skips the step.
        """
        return None

    @abstractmethod
    def step(self, learning_rate: float) -> float:
        """Clip the gradient of the whole model, take a step, and drop the gradients; every rank calls it.

        Return the norm before clipping, the same on every rank. If it is not finite, nothing has changed.
        """

    @abstractmethod
    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of one parameter by slot, empty before the first step.

        The slots are `step`, `exp_avg`, `exp_avg_sq`, and for a parameter in low precision `master`. Each tensor has
        the shape of the parameter's part on this rank, or one element.
        """

    @abstractmethod
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter that has its new weights; without `master` these become the master weights."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the optimizer holds beside the parameters and their gradients."""


class AdamW(Optimizer):
    """torch's fused AdamW over a module's parameters on this rank, with fp32 state.

    AdamW changes fp32 master weights; a bf16 parameter is its master, rounded after each step, so that small updates
    are not lost. Gradients of bf16 parameters are summed in fp32 over micro-batches. An fp32 parameter is its own
    master. AdamW works elementwise, so the local part of a DTensor is enough.

    `module` is already sharded; `groups` and `pipeline_group` are those of `parallel_layers.clip_grad_norm_`.

    Raises:
        ValueError: A parameter is fp16, whose small gradients vanish without a loss scale.
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
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if any(parameter.dtype == torch.float16 for parameter in trained.values()):
            raise ValueError(
                "a model in fp16 needs a loss scale, which only backend='megatron' has: small gradients vanish without "
                "one; load the model with dtype=torch.bfloat16 or torch.float32"
            )
        self._masters: dict[Tensor, Tensor] = {parameter: _master(parameter) for parameter in trained.values()}
        # The stacked biases of experts are vectors, too.
        vectors = {p for name, p in trained.items() if p.dim() <= 1 or name.endswith("bias")}
        decayed = [
            {"params": [m for p, m in self._masters.items() if (p in vectors) is vector], "weight_decay": decay}
            for vector, decay in ((False, options.weight_decay), (True, 0.0))
        ]
        self.adamw = torch.optim.AdamW(
            # torch takes no empty list; a pipeline stage may have no adapters.
            [group for group in decayed if group["params"]] or [{"params": [torch.empty(0)]}],
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
        for parameter in self._masters:
            parameter.grad = None
        return norm

    def _step(self, learning_rate: float) -> None:
        for parameter, master in self._masters.items():
            master.grad = None if parameter.grad is None else _local(parameter.grad).to(master.dtype)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in self._masters.items():
            if parameter.dtype != master.dtype:
                _local(parameter).copy_(master)

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter; a frozen parameter has none."""
        if not parameter.requires_grad:
            return {}
        master = self._masters[parameter]  # a KeyError if FSDP2 has gathered the parameters
        slots: dict[str, Tensor] = dict(self.adamw.state.get(master, {}))
        return slots if parameter.dtype == master.dtype else {**slots, "master": master}

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter; a frozen parameter has none."""
        if not parameter.requires_grad:
            return
        master = self._masters[parameter]
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

    def tensors(self) -> Iterator[Tensor]:
        """Yield the moments, and the master weights that are not parameters."""
        for parameter, master in self._masters.items():
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
