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
        learning_rate, betas, eps: AdamW's; the schedule multiplies the learning rate. 0 learns nothing.
        weight_decay: of matrices; vectors (norms, biases) are not decayed.
        max_grad_norm: the gradient of the whole model is scaled down to this norm; infinity: never.
        schedule: over the optimizer's steps.

    Raises:
        ValueError: a number is out of its range; names the field.
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
        """The state of one parameter by slot, each shaped like the parameter's part on this rank, or of one element;
        empty before the first step."""
        ...

    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Put a state in the place of the parameter's own, which has its new weights already."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the optimizer holds beside the parameters and their gradients."""
        ...


class AdamW:
    """torch's fused AdamW over the parameters that a module has on this rank, with fp32 state whatever they are.

    A parameter of bf16 has an fp32 copy here, its master, which is what AdamW changes; after each step the parameter is
    the master, rounded. Without it an update that is smaller than half a unit in the last place of the weight would be
    lost. Gradients of such parameters add up in fp32 over micro-batches, too. An fp32 parameter is its own master.
    AdamW works elementwise, so a DTensor's part on this rank is all it needs.

    Args:
        module: with its parameters where they will be trained (sharded by FSDP2, say).
        options: the numbers.
        groups: every group over which layers are divided, as `parallel_layers.clip_grad_norm_` takes them.
        pipeline_group: the ranks that hold other layers.

    Raises:
        ValueError: a parameter is of fp16: small gradients vanish there, and no loss is scaled here.
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
                "a model in fp16 learns under a loss scale, which backend='megatron' alone has: without one its small "
                "gradients vanish; load it with dtype=torch.bfloat16 or torch.float32"
            )
        self._masters = [(parameter, _master(parameter)) for _, parameter in named]
        self._index = {id(parameter): number for number, (parameter, _) in enumerate(self._masters)}
        # The biases of experts are vectors, too, stacked.
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
        """Clip, step, and drop the gradients; returns the norm before clipping."""
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
        """`step`, `exp_avg`, `exp_avg_sq`, and of a low-precision parameter `master`."""
        master = self._master(parameter)
        if master is None:
            return {}
        slots: dict[str, Tensor] = dict(self.adamw.state.get(master, {}))
        return slots if parameter.dtype == master.dtype else {**slots, "master": master}

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter; without a `master` in it, the parameter's value becomes the master."""
        master = self._master(parameter)
        if master is None:
            return
        if parameter.dtype != master.dtype or "master" in state:
            # fp32 parameters are their own master weights, also in a run that was saved in bf16.
            master.copy_(state.get("master", _local(parameter)))
        slots = {name: value for name, value in state.items() if name != "master"}
        self.adamw.state.pop(master, None)
        if slots:
            # A slot of its own memory: the fused kernel wants the step count on the device, and all in fp32.
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
        # FSDP2 accumulates and reduces in a type of its own, see `rl_models.engines.fsdp`.
        parameter.grad_dtype = torch.float32
    return _local(parameter).float()
