"""`ParallelMLP`: a gated (SwiGLU, GeGLU) or plain MLP with the intermediate dim sharded over the group.

Shape legend: T' tokens of this rank, H hidden, I intermediate.
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


# Keys are the names of Hugging Face configs (`hidden_act`).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu_squared,
}

# The activation of a gated MLP: a name of `ACTIVATIONS`, or a function of gate and up.
GatedActivation = str | ClampedSwiGLU


def activation_named(name: GatedActivation) -> Callable[[Tensor], Tensor]:
    """Return the activation function `name`; raise ValueError for an unknown name."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"activation={name!r} is unknown; known: {', '.join(sorted(ACTIVATIONS))}, and xielu without a gate"
        )
    return ACTIVATIONS[name]


def check_gated(activation: GatedActivation) -> None:
    """Raise ValueError for an activation that `gated` does not support."""
    if not isinstance(activation, ClampedSwiGLU):
        activation_named(activation)


def gated(activation: GatedActivation, gate_up: Tensor) -> Tensor:
    """Return act(gate) · up, or the `ClampedSwiGLU`, of `[..., 2I]` (gate, then up): `[..., I]`.

    SwiGLU on CUDA is one kernel each way.
    """
    function = activation if isinstance(activation, ClampedSwiGLU) else activation_named(activation)
    if function is F.silu and use_triton(gate_up):
        return fused_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return function(gate, up) if isinstance(function, ClampedSwiGLU) else function(gate) * up


class ParallelMLP(nn.Module):
    """Compute down(act(gate(x)) · up(x)) when gated, and down(act(up(x))) when plain.

    SwiGLU is gated "silu", GeGLU gated "gelu" (https://arxiv.org/abs/2002.05202). Rank r holds rows
    [r I/tp, (r+1) I/tp) of gate and up and the same columns of down. Submodules: `gate_up_proj` (gated) or `up_proj`,
    `down_proj`, and `act_fn` for an activation with parameters.

    Communication, forward / backward: all-reduce `[T, H]` / all-reduce. With sequence parallelism: all-gather and
    reduce-scatter / the same pair in reverse, and one more all-gather of the input.

    Args:
        hidden_size: H.
        intermediate_size: I; divisible by the group's size.
        activation: A name of `ACTIVATIONS`; with a gate also a `ClampedSwiGLU`, without a gate also "xielu".
        gated: The MLP has a gate.
        bias: All projections have biases.
        placement: The groups of the layer and its tokens.
        execution: The execution of the linear layers.
        dtype: dtype of the parameters.
        device: Device of the parameters.

    Raises:
        ValueError: The activation is unknown, or the group's size does not divide I.
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
        elif activation == "xielu":
            self.act_fn = XIELU(group=placement.group, dtype=dtype, device=device)
        else:
            activation_named(activation)  # raise for an unknown name at construction
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
        """Apply the MLP, `[T', H]` -> `[T', H]`."""
        projection = self.gate_up_proj if self.gated else self.up_proj
        return self.down_proj(self.activate(projection(hidden)))

    def activate(self, x: Tensor) -> Tensor:
        """Apply the activation to the first projection: gated `[T, 2 I/tp]`, plain `[T, I/tp]` -> `[T, I/tp]`."""
        if self.gated:
            return gated(self.activation, x)
        return activation_named(self.activation)(x) if self.act_fn is None else self.act_fn(x)
