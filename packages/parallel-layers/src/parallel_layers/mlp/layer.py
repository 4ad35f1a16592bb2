"""`ParallelMLP`: a gated (SwiGLU, GeGLU) or plain MLP with the intermediate dim sharded over the group.

Shape legend: T' tokens of this rank, H hidden, I intermediate.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers.kernels.runtime import use_triton
from parallel_layers.kernels.swiglu import fused_swiglu
from parallel_layers.linear.execution import UNDIVIDED
from parallel_layers.linear.layers import (
    ColumnParallelLinear,
    LinearOptions,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from parallel_layers.mlp.activations import XIELU, ClampedSwiGLU

# Keys are the names of Hugging Face configs (`hidden_act`).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}

# The activation of a gated MLP: a name of `ACTIVATIONS`, or a function of gate and up.
GatedActivation = str | ClampedSwiGLU


def activation_function(activation: GatedActivation, *, gated: bool) -> Callable[..., Tensor]:
    """Return the function of a name, or with a gate the `ClampedSwiGLU` itself; raise ValueError for any other."""
    if gated and isinstance(activation, ClampedSwiGLU):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is unknown; known: {', '.join(sorted(ACTIVATIONS))}, and xielu without a gate"
        )
    return ACTIVATIONS[activation]


def gated(activation: GatedActivation, gate_up: Tensor, *, alternating: bool = False) -> Tensor:
    """Return act(gate) · up, or the `ClampedSwiGLU`, of `[..., 2I]` (gate, then up, or alternating): `[..., I]`.

    SwiGLU on CUDA is one kernel each way.
    """
    function = activation_function(activation, gated=True)
    if function is F.silu and use_triton(gate_up) and not alternating:
        return fused_swiglu(gate_up)
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1) if alternating else gate_up.chunk(2, dim=-1)
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
        **options: See `LinearOptions`; all projections have biases or none.

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
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated = gated
        self.act_fn: XIELU | None = None
        if activation == "xielu" and not gated:
            group = options.get("placement", UNDIVIDED).group
            self.act_fn = XIELU(group=group, dtype=options.get("dtype"), device=options.get("device"))
        else:
            activation_function(activation, gated=gated)  # raise for an unknown name at construction
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
        return self.act_fn(x) if self.act_fn is not None else activation_function(self.activation, gated=False)(x)
