"""`GatedDeltaNet`: the linear attention of Qwen3-Next, Qwen3.5 and OLMo Hybrid, with heads divided over the group.

https://arxiv.org/abs/2412.06464, section 3.4.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden, N
sequences; K key heads of size D and V value heads of size E, of which this rank has K/tp and V/tp.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.cache import LayerCache
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel_layers.linear_attention.config import GatedDeltaNetConfig
from parallel_layers.linear_attention.convolution import ShortConvolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule
from parallel_layers.linear_attention.gates import DecayGate, GatedRMSNorm, of_local_heads
from parallel_layers.linear_attention.head_exchange import operators_over
from parallel_layers.model.options import ContextParallel
from parallel_layers.module.autocast import wide
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.sharding import divide


class GatedDeltaNet(ParallelModule):
    """A gated delta network over packed sequences: a layer that keeps a state of fixed size instead of keys and values.

        [q, k, v, z] = in_proj_qkvz(x),   [b, a] = in_proj_ba(x)
        [q, k, v] = silu(conv1d([q, k, v])),   q and k of each head divided by their norms
        o = gated_delta_rule(q, k, v, log_decay=decay(a), beta=sigmoid(b))
        y = out_proj(norm(o) · silu(z))

    Rank r of tp has key heads [r K/tp, (r+1) K/tp) and the value heads that read them. The parameters stand in a table
    at `GatedDeltaNetConfig`.

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` of the output / one of the
    input's gradient and an all-gather `[T, 2 V]`. With sequence parallelism: all-gather `[T, H]`, all-to-all
    `[T, 2 V / tp]` and reduce-scatter `[T, H]` / the same in reverse, one more all-gather of the input, and an
    all-reduce of the gradient of `in_proj_ba`. Both: an all-reduce of the norm weight's gradient. A context-parallel
    group adds the communication of `context_parallel_convolution`, and of `context_parallel_delta_rule` or
    `ulysses_delta_rule`.

    Args:
        hidden_size: H.
        config: The description of the layer.
        placement: The groups of the layer and its tokens.
        execution: The execution of the linear layers.
        context_group: Context-parallel group; None: every rank has all tokens. Sum the parameters' gradients over the
            group, as over data-parallel ranks.
        context_parallel: "ulysses" or "ring": hand the states over, in the contiguous or the zigzag layout of
            `split_sequence`. "heads": exchange tokens for heads around the recurrence (contiguous layout).
        dtype: dtype of the parameters; `conv1d` and `decay` are at least fp32.
        device: Device of the parameters.

    Raises:
        ValueError: The group's size does not divide the key heads.
    """

    def __init__(
        self,
        hidden_size: int,
        config: GatedDeltaNetConfig,
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
        convolve, self.delta_rule = operators_over(
            context_group, context_parallel, gated_delta_rule, backend=config.backend
        )
        divide(config.num_key_heads, placement.tp, "num_key_heads")
        linear: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        wide_options: dict[str, Any] = {"group": placement.group, "dtype": dtype, "device": device}
        parts = [config.key_dim, config.key_dim, config.value_dim, config.value_dim]
        self.in_proj_qkvz = MergedColumnParallelLinear(hidden_size, parts, **linear)
        # Apart and whole: a few rows decide the decay, which a narrow dtype (FP8) would spoil.
        self.in_proj_ba = ReplicatedLinear(hidden_size, 2 * config.num_value_heads, **linear)
        # Parts, which adapters may have one by one.
        self.in_proj_ba.full_sizes = self.in_proj_ba.local_sizes = [config.num_value_heads] * 2
        keys, values = (config.num_key_heads, config.key_head_dim), (config.num_value_heads, config.value_head_dim)
        self.conv1d = ShortConvolution(
            [keys, keys, values], config.conv_kernel_size, activation="silu", convolve=convolve, **wide_options
        )
        self.decay = DecayGate(config.num_value_heads, **wide_options)
        self.norm = GatedRMSNorm(
            config.value_head_dim, eps=config.norm_eps, group=placement.group, sequence_parallel=True, dtype=dtype,
            device=device,
        )  # fmt: skip
        self.out_proj = RowParallelLinear(config.value_dim, hidden_size, **linear)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Compute the layer inside each sequence: `[T', H]` -> `[T', H]`.

        `cu_seqlens` `[N+1]` int32 are the boundaries among all T tokens, of all context-parallel ranks. With a `cache`,
        of the shape `config.state_shape(tp)`, they are as in `LayerCache.attend`, and every context-parallel rank gets
        all T tokens.
        """
        config = self.config
        *sizes, gate_size = self.in_proj_qkvz.local_sizes
        qkv, z = self.in_proj_qkvz(hidden).split([sum(sizes), gate_size], dim=-1)
        b, a = of_local_heads(self.in_proj_ba(hidden).unflatten(-1, (2, -1)), self.placement).unbind(1)
        states = None if cache is None else cache.states(qkv, cu_seqlens)
        q, k, v = self.conv1d(qkv, cu_seqlens, states).split(sizes, dim=-1)
        q, k = (x.unflatten(-1, (-1, config.key_head_dim)) for x in (q, k))
        v, z = (x.unflatten(-1, (-1, config.value_head_dim)) for x in (v, z))
        beta = b.to(wide(b.dtype)).sigmoid() * (2 if config.negative_eigenvalues else 1)
        delta_rule = self.delta_rule if states is None else partial(states.delta_rule, backend=config.backend)
        out, _ = delta_rule(q, k, v, self.decay(a), beta, cu_seqlens, normalize=True)
        return self.out_proj(self.norm(out, z).flatten(1))
