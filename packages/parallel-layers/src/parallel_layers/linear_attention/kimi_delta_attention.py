"""`KimiDeltaAttention`: the linear attention of Kimi Linear, with heads divided over the group.

https://arxiv.org/abs/2510.26692, section 3.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden, N
sequences; V heads of size D, of which this rank has V/tp.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.cache import LayerCache
from parallel_layers.distributed.collectives import copy_to_tensor_parallel, gather_from_sequence_parallel
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import (
    ColumnParallelLinear,
    HeadsParallelLinear,
    LinearOptions,
    ReplicatedLinear,
    RowParallelLinear,
)
from parallel_layers.linear_attention.config import KimiDeltaConfig
from parallel_layers.linear_attention.convolution import ShortConvolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule
from parallel_layers.linear_attention.gates import DecayGate, GatedRMSNorm
from parallel_layers.linear_attention.head_exchange import operators_over
from parallel_layers.model.options import ContextParallel
from parallel_layers.module.autocast import wide
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.sharding import divide


class KimiDeltaAttention(ParallelModule):
    """Kimi's delta attention over packed sequences: a gated delta network with a decay for each channel of the key.

        [q, k, v] = silu(conv1d(in_proj_qkv(x))),   q and k of each head divided by their norms
        [f, g, b] = in_proj_fgb(x)
        o = gated_delta_rule(q, k, v, log_decay=decay(f_b_proj(f)), beta=sigmoid(b))
        y = out_proj(norm(o) · sigmoid(g_b_proj(g)))

    Rank r of tp has heads [r V/tp, (r+1) V/tp). The parameters stand in a table at `KimiDeltaConfig`.

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` of the output / one of the
    input's gradient and one `[T, 2 D + V]`. With sequence parallelism: all-gather `[T, H]` and `[T, 2 D + V]`, and
    reduce-scatter `[T, H]` / the same in reverse, one more all-gather of the input, and an all-reduce of the gradient
    of `in_proj_fgb`. Both: an all-reduce of the norm weight's gradient.

    Args:
        hidden_size: H.
        config: The description of the layer. See `GatedDeltaNet` for the other arguments.

    Raises:
        ValueError: The group's size does not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        config: KimiDeltaConfig,
        *,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        context_group: ProcessGroup | None = None,
        context_parallel: ContextParallel = "ulysses",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.placement, self.execution = config, placement, execution
        self.num_heads_local = divide(config.num_heads, placement.tp, "num_heads")
        convolve, self.delta_rule = operators_over(
            context_group, context_parallel, gated_delta_rule, backend=config.backend
        )
        linear: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        # The gradient of f and g is reduced once for both projections, in `_share`.
        heads: LinearOptions = {"placement": Placement(placement.group), "dtype": dtype, "device": device}
        options: dict[str, Any] = {"group": placement.group, "dtype": dtype, "device": device}
        size, parts = config.head_dim, [(config.num_heads, config.head_dim)] * 3
        self.in_proj_qkv = HeadsParallelLinear(hidden_size, parts, **linear)
        self.in_proj_fgb = ReplicatedLinear(hidden_size, 2 * size + config.num_heads, **linear)
        # Parts, which adapters may have one by one.
        self.in_proj_fgb.full_sizes = self.in_proj_fgb.local_sizes = [size, size, config.num_heads]
        self.f_b_proj = ColumnParallelLinear(size, config.value_dim, reduce_gradient=False, **heads)
        self.f_b_proj.keeps_dtype = True  # decides the decay, which a narrow dtype (FP8) would spoil
        self.g_b_proj = ColumnParallelLinear(size, config.value_dim, reduce_gradient=False, **heads)
        self.conv1d = ShortConvolution(parts, config.conv_kernel_size, activation="silu", convolve=convolve, **options)
        self.decay = DecayGate(config.num_heads, size, **options)
        self.norm = GatedRMSNorm(size, eps=config.norm_eps, gate="sigmoid", sequence_parallel=True, **options)
        self.out_proj = RowParallelLinear(config.value_dim, hidden_size, **linear)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Compute the layer inside each sequence, `[T', H]` -> `[T', H]`; see `GatedDeltaNet.forward`."""
        size, heads = self.config.head_dim, self.num_heads_local
        qkv = self.in_proj_qkv(hidden)
        states = None if cache is None else cache.states(qkv, cu_seqlens)
        qkv = self.conv1d(qkv, cu_seqlens, states)
        q, k, v = qkv.unflatten(-1, (3, heads, size)).unbind(1)
        f, g, b = self._share(self.in_proj_fgb(hidden)).split(self.in_proj_fgb.local_sizes, dim=-1)
        rank = 0 if self.placement.group is None else self.placement.group.rank()
        beta = b[:, rank * heads : (rank + 1) * heads].to(wide(b.dtype)).sigmoid()
        delta_rule = self.delta_rule if states is None else partial(states.delta_rule, backend=self.config.backend)
        out, _ = delta_rule(q, k, v, self.decay(self.f_b_proj(f)), beta, cu_seqlens, normalize=True)
        gate = self.g_b_proj(g).unflatten(-1, (heads, size))
        return self.out_proj(self.norm(out, gate).flatten(1))

    def _share(self, x: Tensor) -> Tensor:
        """Gather the ranks' rows, `[T', ...]` -> `[T, ...]`; each rank uses them for its own heads."""
        share = gather_from_sequence_parallel if self.placement.sequence_parallel else copy_to_tensor_parallel
        return share(x, self.placement.group, reduce_dtype=self.execution.reduce_dtype)
