"""The gates of linear attention: the decay of the state, and the norm of the outputs with its gate.

Shape legend: T tokens, V value heads of this rank, E value size.
"""

from typing import Unpack

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

    Parameters: `A_log` and `dt_bias`, `[V]` each, divided by heads, fp32 beside any dtype: bf16 would round away small
    updates of numbers that compound over all tokens.

    Args:
        num_heads: Value heads over all ranks.
        group: Tensor-parallel group; None: all heads.
        dtype, device: Of the layer; the parameters are at least fp32.

    Raises:
        ValueError: The group's size does not divide the heads.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sharding = shard_evenly([num_heads], group, 0, "num_value_heads")
        heads = num_heads // (1 if group is None else group.size())
        for name in ("A_log", "dt_bias"):
            setattr(self, name, nn.Parameter(torch.empty(heads, dtype=wide_dtype(dtype), device=device)))
            set_sharding(self, name, sharding)
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

    def forward(self, a_TV: Tensor) -> Tensor:
        """`[T, V]` -> the log of the factors `[T, V]`, in fp32 (fp64 for fp64 input)."""
        dtype = wide(a_TV.dtype)
        return -self.A_log.to(dtype).exp() * F.softplus(a_TV.to(dtype) + self.dt_bias.to(dtype))


class GatedRMSNorm(Norm):
    """RMSNorm of each head's output, times silu of a gate: `rms_norm(x) · silu(z)`; the weight `[E]` serves all heads.

    Ranks with different heads share the weight, so the backward all-reduces its gradient; see `Norm`.
    """

    def __init__(self, hidden_size: int, *, eps: float = 1e-6, **options: Unpack[NormOptions]) -> None:
        super().__init__(hidden_size, eps=eps, **options)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, weight, eps=self.eps)

    def forward(self, x_TVE: Tensor, gate_TVE: Tensor) -> Tensor:  # type: ignore[override]
        """`[T, V, E]` and the gate `[T, V, E]` -> `[T, V, E]` in x's dtype."""
        normed = self.normalize(x_TVE, copy_to_tensor_parallel(self.weight, self.gradient_group))
        dtype = wide(x_TVE.dtype)
        return (normed.to(dtype) * F.silu(gate_TVE.to(dtype))).to(x_TVE.dtype)
