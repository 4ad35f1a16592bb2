"""`Mamba2`: the state-space layer of Nemotron-H and Granite's hybrids, with groups of heads divided over the group.

https://arxiv.org/abs/2405.21060, section 7.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden, N
sequences; V heads of size E in G groups with states of size D, of which this rank has V/tp and G/tp.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.context_parallel.sequence_layout import Layout
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel_layers.linear_attention.config import Mamba2Config
from parallel_layers.linear_attention.context_parallel import operators_over
from parallel_layers.linear_attention.convolution import ShortConvolution
from parallel_layers.linear_attention.gates import GatedGroupRMSNorm, StateSpace, of_local_heads
from parallel_layers.linear_attention.state_space import state_space_dual
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.sharding import divide


class Mamba2(ParallelModule):
    """A Mamba-2 layer over packed sequences: a layer that keeps a state of fixed size instead of keys and values.

        [z, x, B, C] = in_proj_zxbc(x),   dt = in_proj_dt(x)
        [x, B, C] = silu(conv1d([x, B, C]))
        o = state_space_dual(x, softplus(dt + dt_bias), -exp(A_log), B, C, D_V=D)
        y = out_proj(norm(o · silu(z)))

    Rank r of tp has groups [r G/tp, (r+1) G/tp) and their heads. The parameters stand in a table at `Mamba2Config`.

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` of the output / one of the
    input's gradient and an all-gather `[T, V]`. With sequence parallelism: all-gather `[T, H]`, all-to-all
    `[T, V / tp]` and reduce-scatter `[T, H]` / the same in reverse, one more all-gather of the input, and an all-reduce
    of the gradient of `in_proj_dt`. A context-parallel group adds the communication of `context_parallel_state_space`
    and `context_parallel_convolution`.

    Args:
        hidden_size: H.
        config: The description of the layer.
        placement: The groups of the layer and its tokens.
        execution: The execution of the linear layers.
        context_group, context_layout: See `GatedDeltaNet`.
        dtype: dtype of the parameters; `conv1d` and `state_space` are at least fp32.
        device: Device of the parameters.

    Raises:
        ValueError: The group's size does not divide the groups of heads.
    """

    def __init__(
        self,
        hidden_size: int,
        config: Mamba2Config,
        *,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        context_group: ProcessGroup | None = None,
        context_layout: Layout = "contiguous",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        convolve, self.recurrence = operators_over(context_group, context_layout, state_space_dual)
        divide(config.num_groups, placement.tp, "num_groups")
        linear: dict[str, Any] = {
            "bias": config.projection_bias, "placement": placement, "execution": execution, "dtype": dtype,
            "device": device,
        }  # fmt: skip
        options: dict[str, Any] = {"group": placement.group, "dtype": dtype, "device": device}
        parts = [config.value_dim, config.group_dim, config.group_dim]
        self.in_proj_zxbc = MergedColumnParallelLinear(hidden_size, [config.value_dim, *parts], **linear)
        # Apart and whole, as `in_proj_ba` of `GatedDeltaNet`.
        self.in_proj_dt = ReplicatedLinear(hidden_size, config.num_heads, **linear)
        self.conv1d = ShortConvolution(
            parts, config.conv_kernel_size, bias=config.conv_bias, activation="silu", convolve=convolve, **options
        )
        self.state_space = StateSpace(config.num_heads, step_limit=config.step_limit, **options)
        self.norm = GatedGroupRMSNorm(config.value_dim, config.num_groups, eps=config.norm_eps, **options)
        self.out_proj = RowParallelLinear(config.value_dim, hidden_size, **linear)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Compute the layer inside each sequence, `[T', H]` -> `[T', H]`; see `GatedDeltaNet.forward`."""
        gate_size, *sizes = self.in_proj_zxbc.local_sizes
        z, xbc = self.in_proj_zxbc(hidden).split([gate_size, sum(sizes)], dim=-1)
        x, b, c = self.conv1d(xbc, cu_seqlens).split(sizes, dim=-1)
        steps, rates = self.state_space(of_local_heads(self.in_proj_dt(hidden), self.placement))
        x = x.unflatten(-1, (-1, self.config.head_dim))
        b, c = (part.unflatten(-1, (-1, self.config.state_size)) for part in (b, c))
        out, _ = self.recurrence(x, steps, rates, b, c, cu_seqlens, D_V=self.state_space.D)
        return self.out_proj(self.norm(out.flatten(1), z))
