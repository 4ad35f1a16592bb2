"""`Mamba2`: the state-space layer of Nemotron-H and Granite's hybrids, divided over the group by heads.

https://arxiv.org/abs/2405.21060, section 7.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden, N
sequences; V heads of size E in G groups with states of size D, of which this rank has V/tp and max(G/tp, 1).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.cache import LayerCache
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import HeadsParallelLinear, RowParallelLinear
from parallel_layers.linear_attention.config import Mamba2Config
from parallel_layers.linear_attention.convolution import ShortConvolution
from parallel_layers.linear_attention.gates import GatedGroupRMSNorm, StateSpace
from parallel_layers.linear_attention.head_exchange import operators_over
from parallel_layers.linear_attention.state_space import state_space_dual
from parallel_layers.model.options import ContextParallel
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.sharding import divide, divide_heads


class Mamba2(ParallelModule):
    """A Mamba-2 layer over packed sequences: a layer that keeps a state of fixed size instead of keys and values.

        [z, x, B, C, dt] = in_proj(u)
        [x, B, C] = silu(conv1d([x, B, C]))
        o = state_space_dual(x, softplus(dt + dt_bias), -exp(A_log), B, C, D_V=D)
        y = out_proj(norm(o · silu(z)))

    Rank r of tp has heads [r V/tp, (r+1) V/tp). With more ranks than groups each rank has B and C of the group of its
    heads. The parameters stand in a table at `Mamba2Config`.

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` of the output / one of the
    input's gradient. With sequence parallelism: all-gather and reduce-scatter `[T, H]` / the same in reverse, and one
    more all-gather of the input. With more ranks than groups also one all-reduce `[T, G]` of the norm's sums / one
    of their gradients, and one for each parameter of B and C. A context-parallel group adds the communication of
    `context_parallel_convolution`, and of `context_parallel_state_space` or `ulysses_state_space`.

    Args:
        hidden_size: H.
        config: The description of the layer.
        placement: The groups of the layer and its tokens.
        execution: The execution of the linear layers.
        context_group, context_parallel: See `GatedDeltaNet`.
        dtype: dtype of the parameters; `conv1d` and `state_space` are at least fp32.
        device: Device of the parameters.

    Raises:
        ValueError: The group's size does not divide the heads, or neither divides the groups of heads nor is divided by
            them.
    """

    def __init__(
        self,
        hidden_size: int,
        config: Mamba2Config,
        *,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        context_group: ProcessGroup | None = None,
        context_parallel: ContextParallel = "ulysses",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        convolve, self.recurrence = operators_over(context_group, context_parallel, state_space_dual)
        divide(config.num_heads, placement.tp, "num_heads")
        divide_heads(config.num_groups, config.num_heads, placement.tp, "num_groups")
        linear: dict[str, Any] = {
            "bias": config.projection_bias, "placement": placement, "execution": execution, "dtype": dtype,
            "device": device,
        }  # fmt: skip
        options: dict[str, Any] = {"group": placement.group, "dtype": dtype, "device": device}
        values, groups = (config.num_heads, config.head_dim), (config.num_groups, config.state_size)
        convolved = [values, groups, groups]
        self.in_proj = HeadsParallelLinear(hidden_size, [values, *convolved, (config.num_heads, 1)], **linear)
        self.conv1d = ShortConvolution(
            convolved, config.conv_kernel_size, bias=config.conv_bias, activation="silu", convolve=convolve, **options
        )
        self.state_space = StateSpace(config.num_heads, step_limit=config.step_limit, **options)
        self.norm = GatedGroupRMSNorm(config.value_dim, config.num_groups, eps=config.norm_eps, **options)
        self.out_proj = RowParallelLinear(config.value_dim, hidden_size, **linear)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Compute the layer inside each sequence, `[T', H]` -> `[T', H]`; see `GatedDeltaNet.forward`."""
        gate_size, *sizes, heads = self.in_proj.local_sizes
        z, xbc, dt = self.in_proj(hidden).split([gate_size, sum(sizes), heads], dim=-1)
        states = None if cache is None else cache.states(xbc, cu_seqlens)
        x, b, c = self.conv1d(xbc, cu_seqlens, states).split(sizes, dim=-1)
        steps, rates, skips = self.state_space(dt)
        x = x.unflatten(-1, (-1, self.config.head_dim))
        b, c = (part.unflatten(-1, (-1, self.config.state_size)) for part in (b, c))
        recurrence = self.recurrence if states is None else states.state_space
        out, _ = recurrence(x, steps, rates, b, c, cu_seqlens, D_V=skips)
        return self.out_proj(self.norm(out.flatten(1), z))
