"""The gates of linear attention: the decay of the state, and the norm of the outputs with its gate.

Shape legend: T tokens, V value heads of this rank, E value size.
"""

from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.module.autocast import wide
from parallel_layers.module.parallel_module import WideModule, wide_dtype
from parallel_layers.module.sharding import blocks_of, full_shape, set_sharding, shard_evenly
from parallel_layers.norm.base import Norm, NormOptions
from parallel_layers.norm.rms import rms_norm

# The range in which transformers draws exp(A_log).
_RATES = (0.01, 16.0)


class DecayGate(WideModule):
    """The log of the factor by which a state decays at a token: g = -exp(A_log) · softplus(a + dt_bias) <= 0.

    Parameters: `A_log` `[V]` and `dt_bias` `[V]`, or `[V D]` with a factor for each channel, divided by heads, fp32
    beside any dtype: bf16 would round away small updates of numbers that compound over all tokens.

    Args:
        num_heads: Value heads over all ranks.
        head_dim: D, the channels of a key that have factors of their own; None: one factor for each head.
        group: Tensor-parallel group; None: all heads.
        dtype, device: Of the layer; the parameters are at least fp32.

    Raises:
        ValueError: The group's size does not divide the heads.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int | None = None,
        *,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        for name, size in (("A_log", num_heads), ("dt_bias", num_heads * (head_dim or 1))):
            local = size // (1 if group is None else group.size())
            set_sharding(self, name, shard_evenly([size], group, 0, "num_value_heads"))
            setattr(self, name, nn.Parameter(torch.empty(local, dtype=wide_dtype(dtype), device=device)))
        self.reset_parameters()

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set `dt_bias` to 1, and exp(A_log) to evenly spaced numbers from 0.01 to 16, of which transformers draws."""
        nn.init.ones_(self.dt_bias)
        rates = torch.linspace(*_RATES, full_shape(self, "A_log")[0], dtype=torch.float64).log()
        for local, full in blocks_of(self, "A_log"):
            self.A_log[local] = rates[full].to(self.A_log)

    def forward(self, a: Tensor) -> Tensor:
        """`[T, V]` or `[T, V D]` -> the log of the factors, `[T, V]` or `[T, V, D]`, in fp32 (fp64 for fp64 input)."""
        dtype = wide(a.dtype)
        rates, steps = self.A_log.to(dtype).exp(), F.softplus(a.to(dtype) + self.dt_bias.to(dtype))
        if self.head_dim is not None:
            rates, steps = rates[:, None], steps.unflatten(-1, (-1, self.head_dim))
        return -rates * steps


class GatedRMSNorm(Norm):
    """RMSNorm of each head's output, times the activation of a gate; the weight `[E]` serves all heads.

    Ranks with different heads share the weight, so the backward all-reduces its gradient; see `Norm`.

    Args:
        hidden_size: E.
        eps: Added to the mean square.
        gate: "silu" (gated delta networks) or "sigmoid" (Kimi).
        **options: `group`, `sequence_parallel`, `dtype` and `device`, see `Norm`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        gate: Literal["silu", "sigmoid"] = "silu",
        **options: Unpack[NormOptions],
    ) -> None:
        super().__init__(hidden_size, eps=eps, **options)
        self.activation = F.silu if gate == "silu" else torch.sigmoid

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, weight, eps=self.eps)

    def forward(self, x_TVE: Tensor, gate_TVE: Tensor) -> Tensor:  # type: ignore[override]
        """`[T, V, E]` and the gate `[T, V, E]` -> `[T, V, E]` in x's dtype."""
        normed = self.normalize(x_TVE, copy_to_tensor_parallel(self.weight, self.gradient_group))
        dtype = wide(x_TVE.dtype)
        return (normed.to(dtype) * self.activation(gate_TVE.to(dtype))).to(x_TVE.dtype)
