"""`OptimizerOptions`, and `Optimizer`: the interface of an engine's optimizer to a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Literal, get_args

from parallel_layers.training import Schedule
from parallel_models.engine.checks import require_flags, require_kind, require_number

if TYPE_CHECKING:  # the options above the interface are read without torch
    from torch import Tensor

Algorithm = Literal["adamw", "muon"]
Moments = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, gradient clipping and the schedule.

    Attributes:
        learning_rate: The learning rate, which the schedule multiplies.
        betas: AdamW's decays of the mean gradient and of the mean squared gradient, such as 0.9,0.95.
        eps: AdamW's epsilon, in the denominator.
        weight_decay: The decoupled weight decay, of matrices alone. See `parallel_layers.training.has_weight_decay`.
        max_grad_norm: Scale the gradient of the whole model down to this norm; infinity: never.
        schedule: The schedule over the optimizer's steps.
        algorithm: The algorithm: "adamw", or "muon" for the weight matrices of the layers and AdamW for the rest. See
            Loshchilov and Hutter 2019, arXiv:1711.05101, and `parallel_models.optimizers.muon`.
        momentum: The momentum of Muon.
        moments: The storage of the moments: "float32", "bfloat16", or "int8" by blocks of 256 elements. The last two
            are rounded stochastically (`parallel_models.optimizers.moments`).
        offload: Keep the moments and the fp32 master weights in pinned host memory. A step streams them through the
            GPU in buckets (`parallel_layers.memory.StreamedTensors`), and gives the same bits. fp32 weights are their
            own masters and stay on the GPU.

    Raises:
        ValueError: A number is out of its range, or a name is unknown.
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    algorithm: Algorithm = "adamw"
    momentum: float = 0.95
    moments: Moments = "float32"
    offload: bool = False

    def __post_init__(self) -> None:
        require_flags(self)
        require_number("learning_rate", self.learning_rate, at_least=0)
        require_number("weight_decay", self.weight_decay, at_least=0)
        require_number("eps", self.eps, positive=True)
        require_number("max_grad_norm", self.max_grad_norm, positive=True, finite=False)
        pair = isinstance(self.betas, Sequence) and len(self.betas) == 2
        if not pair or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in [0, 1)")
        require_kind("schedule", self.schedule, Schedule)
        require_number("momentum", self.momentum, at_least=0)
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum} must be below 1")
        for name, choices in (("algorithm", Algorithm), ("moments", Moments)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise ValueError(f"{name}={value!r} is unknown; use {' or '.join(map(repr, get_args(choices)))}")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the step that follows `step` completed steps."""
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

        The slots are `step`, `exp_avg` and `exp_avg_sq` of AdamW, `momentum_buffer` of Muon, and for a parameter in low
        precision `master`. Each tensor has the shape of the parameter's part on this rank, or one element.
        """

    def require_states(self, states: Iterable[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Raise ValueError if the loaded states of parameters are of another algorithm."""
        for parameter, state in states:
            if not parameter.requires_grad:
                continue
            slots, expected = state.keys() - {"master"}, self.slots(parameter)
            if slots and slots != expected:
                algorithm = "muon" if "momentum_buffer" in slots else "adamw"
                raise ValueError(
                    f"the checkpoint has the optimizer state {', '.join(sorted(slots))} of a weight whose optimizer "
                    f"keeps {', '.join(sorted(expected))}; resume with OptimizerOptions(algorithm={algorithm!r}), or "
                    "begin from the saved weights alone"
                )

    def slots(self, parameter: Tensor) -> frozenset[str]:
        """Return the slots of the state of a trained parameter, without `master`; the default: AdamW's."""
        return frozenset(("step", "exp_avg", "exp_avg_sq"))

    @abstractmethod
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter that has its new weights; without `master` these become the master weights."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the optimizer holds beside the parameters and their gradients."""
