"""`ParallelMLP`: gated (SwiGLU, GeGLU) or plain, the intermediate dim sharded over the group.

Shape legend: T' tokens of this rank, H hidden, I intermediate, n ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.swiglu import fused_swiglu
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import (
    ColumnParallelLinear,
    LinearOptions,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from parallel_layers.mlp.activations import XIELU, ClampedSwiGLU


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


# By the names of Hugging Face configs (`hidden_act`).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu_squared,
}

# Those with parameters of their own, for an MLP without a gate.
LEARNED_ACTIVATIONS: dict[str, type[XIELU]] = {"xielu": XIELU}

# What a gated MLP takes: a name of `ACTIVATIONS`, or a function of gate and up together.
GatedActivation = str | ClampedSwiGLU


def activation_named(name: GatedActivation) -> Callable[[Tensor], Tensor]:
    """The activation of one tensor called `name`; raises ValueError that lists the known ones."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def check_gated(activation: GatedActivation) -> None:
    """Raise ValueError for an activation that `gated` does not take."""
    if activation in LEARNED_ACTIVATIONS:
        raise ValueError(f"activation={activation!r} has parameters and goes with gated=False alone")
    if not isinstance(activation, ClampedSwiGLU):
        activation_named(activation)


def gated(activation: GatedActivation, gate_up: Tensor) -> Tensor:
    """act(gate) · up, or for `ClampedSwiGLU` what that says, of `[..., 2I]` (gate, then up): `[..., I]`.

    SwiGLU on CUDA is one kernel each way.
    """
    function = activation if isinstance(activation, ClampedSwiGLU) else activation_named(activation)
    if function is F.silu and use_triton(gate_up):
        return fused_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return function(gate, up) if isinstance(function, ClampedSwiGLU) else function(gate) * up


class ParallelMLP(nn.Module):
    """down(act(gate(x)) · up(x)) when gated, down(act(up(x))) when plain.

    SwiGLU is gated "silu", GeGLU gated "gelu" (https://arxiv.org/abs/2002.05202). Rank r holds rows
    [r I/n, (r+1) I/n) of gate and up and those columns of down. Submodules: `gate_up_proj` (gated) or `up_proj`,
    `down_proj`, and `act_fn` where the activation has parameters.

    Communication, forward / backward: all-reduce `[T, H]` / all-reduce; with sequence parallelism all-gather and
    reduce-scatter / the same pair in reverse, and the input is gathered once more.

    Args:
        hidden_size: H.
        intermediate_size: I; divisible by the group's size.
        activation: A name of `ACTIVATIONS`; with a gate also a `ClampedSwiGLU`, without one a name of
            `LEARNED_ACTIVATIONS`.
        gated: With a gate.
        bias: Biases of all projections.
        placement: Where the parts of the layer and of its tokens are.
        execution: How the linear layers compute and communicate.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ValueError: An unknown activation, or I does not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: GatedActivation = "silu",
        gated: bool = True,
        bias: bool = False,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated = gated
        self.act_fn: XIELU | None = None
        if gated:
            check_gated(activation)
        elif isinstance(activation, str) and activation in LEARNED_ACTIVATIONS:
            self.act_fn = LEARNED_ACTIVATIONS[activation](group=placement.group, dtype=dtype, device=device)
        else:
            activation_named(activation)  # an unknown name is an error now
        options: LinearOptions = {
            "bias": bias, "placement": placement, "execution": execution, "dtype": dtype, "device": device,
        }  # fmt: skip
        if gated:
            self.gate_up_proj = MergedColumnParallelLinear(
                hidden_size, [intermediate_size, intermediate_size], **options
            )
        else:
            self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T', H]` -> `[T', H]`."""
        if self.gated:
            return self.down_proj(gated(self.activation, self.gate_up_proj(hidden)))
        activation = activation_named(self.activation) if self.act_fn is None else self.act_fn
        return self.down_proj(activation(self.up_proj(hidden)))
