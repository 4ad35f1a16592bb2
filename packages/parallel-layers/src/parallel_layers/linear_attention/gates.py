"""The gates of linear attention: the decay of the state, the steps of Mamba-2, and norms of the outputs with a gate.

Shape legend: T tokens, T' this rank's tokens under sequence parallelism (else T), V value heads of this rank, E value
size.
"""

from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import all_to_all, copy_to_tensor_parallel, scatter_to_tensor_parallel
from parallel_layers.kernels.gated_norm import fused_gated_rms_norm, supports_gated_rms_norm
from parallel_layers.linear.execution import Placement
from parallel_layers.linear_attention.shared_heads import SharedHeads
from parallel_layers.module.autocast import wide
from parallel_layers.module.parallel_module import ParallelModule, WideModule, wide_dtype
from parallel_layers.module.sharding import blocks_of, divide_heads, full_shape, set_sharding, shard_evenly
from parallel_layers.norm.base import Norm, NormOptions
from parallel_layers.norm.rms import rms_norm

# The range in which transformers draws exp(A_log).
_RATES = (0.01, 16.0)


class DecayGate(WideModule):
    """The log of the factor by which a state decays at a token: g = -exp(A_log) · softplus(a + dt_bias) <= 0.

    Parameters: `A_log` `[V]` and `dt_bias` `[V]`, or `[V, 1]` and `[V D]` with a factor for each channel, divided by
    heads, fp32 beside any dtype: bf16 would round away small updates of numbers that compound over all tokens.

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
            shape = (local, 1) if name == "A_log" and head_dim is not None else (local,)
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=wide_dtype(dtype), device=device)))
        self.reset_parameters()

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set `dt_bias` to 1, and exp(A_log) to evenly spaced numbers from 0.01 to 16, of which transformers draws."""
        nn.init.ones_(self.dt_bias)
        rates = torch.linspace(*_RATES, full_shape(self, "A_log")[0], dtype=torch.float64).log()
        rates = rates.view(-1, *self.A_log.shape[1:])
        for local, full in blocks_of(self, "A_log"):
            self.A_log[local] = rates[full].to(self.A_log)

    def forward(self, a: Tensor) -> Tensor:
        """`[T, V]` or `[T, V D]` -> the log of the factors, `[T, V]` or `[T, V, D]`, in fp32 (fp64 for fp64 input)."""
        dtype = wide(a.dtype)
        rates, steps = self.A_log.to(dtype).exp(), F.softplus(a.to(dtype) + self.dt_bias.to(dtype))
        if self.head_dim is not None:
            steps = steps.unflatten(-1, (-1, self.head_dim))
        return -rates * steps


class StateSpace(WideModule):
    """The steps of Mamba-2, dt = softplus(dt + dt_bias) inside limits, and its A = -exp(A_log) < 0.

    Parameters: `A_log`, `D` and `dt_bias`, `[V]` each, divided by heads, fp32 beside any dtype as in `DecayGate`.

    Args:
        num_heads: Heads over all ranks.
        step_limit: The smallest and the largest step.
        group, dtype, device: See `DecayGate`.

    Raises:
        ValueError: The group's size does not divide the heads.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        step_limit: tuple[float, float],
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.step_limit = step_limit
        local = num_heads // (1 if group is None else group.size())
        for name in ("A_log", "D", "dt_bias"):
            set_sharding(self, name, shard_evenly([num_heads], group, 0, "num_heads"))
            setattr(self, name, nn.Parameter(torch.empty(local, dtype=wide_dtype(dtype), device=device)))
        self.reset_parameters()

    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set `D` and `dt_bias` to 1, and exp(A_log) of head h to h + 1, as transformers does."""
        nn.init.ones_(self.D)
        nn.init.ones_(self.dt_bias)
        rates = torch.arange(1, full_shape(self, "A_log")[0] + 1, dtype=torch.float64).log()
        for local, full in blocks_of(self, "A_log"):
            self.A_log[local] = rates[full].to(self.A_log)

    def forward(self, dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, V]` -> the steps `[T, V]`, A `[V]` and D `[V]`, in fp32 (fp64 for fp64 input)."""
        dtype = wide(dt.dtype)
        steps = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.step_limit)
        # A copy, because FSDP2 frees the parameters behind this forward.
        return steps, -self.A_log.to(dtype).exp(), self.D.to(dtype, copy=True)


class GatedGroupRMSNorm(ParallelModule):
    """RMSNorm over each group of channels of x · silu(gate), in which the gate comes first (Mamba-2).

    Each rank has consecutive channels and their part of the weight `[C]`. With more ranks than groups the ranks of a
    group sum their squares: one all-reduce `[G, T]` fp32 in the forward and one in the backward.

    Args:
        num_channels: C, over all ranks.
        num_groups: G, groups of consecutive channels, over all ranks.
        eps: Added to the mean square.
        group: Tensor-parallel group; None: all channels.
        dtype, device: Of the weight.

    Raises:
        ValueError: The group's size does not divide the channels, or neither divides the groups nor is divided by them.
    """

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        *,
        eps: float,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tp = 1 if group is None else group.size()
        self.eps, self.num_groups_local = eps, divide_heads(num_groups, num_channels, tp, "num_groups")
        self.shared_groups = SharedHeads(group, num_groups)
        self.weight = nn.Parameter(torch.empty(num_channels // tp, dtype=dtype, device=device))
        set_sharding(self, "weight", shard_evenly([num_channels], group, 0, "channels"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """`[T, C/tp]` and the gate `[T, C/tp]` -> `[T, C/tp]` in x's dtype, computed in fp32 (fp64 for fp64 input)."""
        dtype, groups = wide(x_TC.dtype), (self.num_groups_local, -1)
        x, gate, weight = x_TC.unflatten(-1, groups), gate_TC.unflatten(-1, groups), self.weight.unflatten(0, groups)
        if self.shared_groups.replicas == 1 and supports_gated_rms_norm(x, gate, weight):
            return fused_gated_rms_norm(x, gate, weight, self.eps, gate_first=True).flatten(-2)
        gated = x.to(dtype) * F.silu(gate.to(dtype))
        if self.shared_groups.replicas == 1:
            normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps)
        else:
            size = gated.shape[-1] * self.shared_groups.replicas
            squares = self.shared_groups.sum(gated.square().sum(-1, keepdim=True))
            normed = gated * torch.rsqrt(squares / size + self.eps)
        return (normed.flatten(-2) * self.weight.to(dtype)).to(x_TC.dtype)


def of_local_heads(x: Tensor, placement: Placement) -> Tensor:
    """Keep this rank's heads of all tokens, `[T', ..., tp V]` -> `[T, ..., V]`."""
    if placement.sequence_parallel:
        return all_to_all(x, placement.group, split_dim=x.dim() - 1, concat_dim=0)
    return scatter_to_tensor_parallel(x, placement.group)


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
        self.gate = gate

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, weight, eps=self.eps)

    def forward(self, x_TVE: Tensor, gate_TVE: Tensor) -> Tensor:  # type: ignore[override]
        """`[T, V, E]` and the gate `[T, V, E]` -> `[T, V, E]` in x's dtype."""
        weight = copy_to_tensor_parallel(self.weight, self.gradient_group)
        if supports_gated_rms_norm(x_TVE, gate_TVE, weight):
            return fused_gated_rms_norm(x_TVE, gate_TVE, weight, self.eps, gate_first=False, silu=self.gate == "silu")
        dtype, activation = wide(x_TVE.dtype), F.silu if self.gate == "silu" else torch.sigmoid
        return (self.normalize(x_TVE, weight).to(dtype) * activation(gate_TVE.to(dtype))).to(x_TVE.dtype)
