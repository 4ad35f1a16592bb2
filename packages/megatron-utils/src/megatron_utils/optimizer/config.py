"""`OptimizerConfig`: the settings of an optimizer, and Megatron's config from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig, ParamKey
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from parallel_layers.training import has_weight_decay


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has the type of a field; lists pass for tuples, ints for floats, bools for neither."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, option) for option in kinds)
    if origin is Literal:
        return isinstance(value, str)  # the configs check which texts are allowed
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        kinds = kinds[:1] * len(value) if ... in kinds else kinds
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    return isinstance(value, {float: Real, int: Integral}.get(kind, kind)) and (kind is bool) == isinstance(value, bool)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) on Megatron's optimizers.

    Raises:
        ValueError: A value has another type or is out of range (named), or `loss_scale` is given without fp16.
    """

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of all parameters that are not exempt."""
    no_weight_decay: tuple[str, ...] | None = None
    """Parameters without weight decay: shell patterns on their names in a chunk, such as "embedding.*".

    None: vectors and the stacked biases of experts, as `parallel_layers.training.has_weight_decay` says.
    """
    clip_grad: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the parameters; bf16 and fp16 keep fp32 master weights."""
    distributed: bool = False
    """Shard master weights and moments over data parallelism (ZeRO stage 1, arXiv:1910.02054)."""
    cpu_offload_fraction: float = 0.0
    """Fraction of the optimizer state that is kept and updated on the CPU."""
    loss_scale: float | None = None
    """A constant loss scale, for fp16 only; None scales fp16 dynamically by the four fields below."""
    initial_loss_scale: float = 2.0**16
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    """Steps without an overflow after which the scale doubles."""
    hysteresis: int = 2
    """Number of overflows before the scale halves."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _fits(value, hints[field.name]):
                raise ValueError(f"{field.name}={value!r} must be of type {field.type}")
        for name, fine in {
            "lr": self.lr >= 0,
            "betas": all(0 <= beta < 1 for beta in self.betas),
            "eps": self.eps > 0,
            "weight_decay": self.weight_decay >= 0,
            "clip_grad": self.clip_grad is None or self.clip_grad > 0,
            "precision": self.precision in ("fp32", "bf16", "fp16"),
            "cpu_offload_fraction": 0 <= self.cpu_offload_fraction <= 1,
            "loss_scale": self.loss_scale is None or self.loss_scale > 0,
            "initial_loss_scale": self.initial_loss_scale > 0,
            "min_loss_scale": 0 < self.min_loss_scale <= self.initial_loss_scale,
            "loss_scale_window": self.loss_scale_window >= 1,
            "hysteresis": self.hysteresis >= 1,
        }.items():
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range")
        if self.loss_scale is not None and self.precision != "fp16":
            raise ValueError(
                f"loss_scale={self.loss_scale} is for precision='fp16' alone, not {self.precision!r}; leave it out"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    def to_megatron(self) -> MegatronOptimizerConfig:
        """Return the same settings as Megatron-Core's config."""
        return MegatronOptimizerConfig(
            optimizer="adam",
            lr=self.lr,
            weight_decay=self.weight_decay,
            adam_beta1=self.betas[0],
            adam_beta2=self.betas[1],
            adam_eps=self.eps,
            clip_grad=self.clip_grad or 0.0,
            fp16=self.precision == "fp16",
            bf16=self.precision == "bf16",
            params_dtype=self.dtype,
            use_distributed_optimizer=self.distributed,
            optimizer_cpu_offload=self.cpu_offload_fraction > 0,
            optimizer_offload_fraction=self.cpu_offload_fraction,
            loss_scale=self.loss_scale,
            initial_loss_scale=self.initial_loss_scale,
            min_loss_scale=self.min_loss_scale,
            loss_scale_window=self.loss_scale_window,
            hysteresis=self.hysteresis,
        )

    def overrides(self) -> dict[ParamKey, ParamGroupOverride]:
        """Return Megatron's description of the parameters without weight decay."""
        exempt = ParamGroupOverride(wd_mult=0.0)
        if self.no_weight_decay is None:
            vectors = ParamWithNamePredicate("no weight decay", lambda p, name: not has_weight_decay(name, p))
            return {ParamKey(with_name_predicate=vectors): exempt}
        if not self.no_weight_decay:
            return {}
        # Megatron matches the names under its wrapper for data parallelism.
        return {ParamKey(name=tuple(f"module.{name}" for name in self.no_weight_decay)): exempt}
