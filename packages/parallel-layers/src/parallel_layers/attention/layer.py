"""`ParallelAttention`: projections, rotary embedding and packed attention, with heads sharded over the group.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden,
Q query heads and K key-value heads of this rank, D head size, S segments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.attention.cache import CacheShape, LayerCache
from parallel_layers.attention.config import AttentionConfig
from parallel_layers.attention.context_parallel.ring import ring_attention
from parallel_layers.attention.context_parallel.ulysses import ulysses_attention
from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.attention.shared_keys import SharedKeys
from parallel_layers.attention.shared_kv import SharedKeysValues
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import QKVParallelLinear, RowParallelLinear
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.sharding import set_sharding, shard_evenly
from parallel_layers.norm.rms import HeadShardedRMSNorm, RMSNorm, rms_norm
from parallel_layers.rotary.rotation import apply_rotary, rotate_queries_and_keys, split_and_rotate


def attention_over(context_group: ProcessGroup | None, config: AttentionConfig) -> Callable[..., Tensor]:
    """Return the attention function: `packed_attention`, or its context-parallel form over `context_group`."""
    if context_group is None:
        return packed_attention
    return partial(ring_attention if config.context_parallel == "ring" else ulysses_attention, group=context_group)


def attention_of_call(
    attend: Callable[..., Tensor], cache: LayerCache | None, shared_keys: SharedKeys | None
) -> Callable[..., Tensor]:
    """Return the attention of one call: a layer's own `attend`, or over the keys of a cache, or over shared keys.

    Raises:
        ValueError: Shared keys come with a cache, or with context parallelism.
    """
    if shared_keys is None:
        return attend if cache is None else cache.attend
    if cache is not None or attend is not packed_attention:
        conflict = "a context-parallel group" if cache is None else "a cache"
        raise ValueError(f"shared keys do not go with {conflict}: give whole sequences, or leave {conflict} out")
    return shared_keys.attend


class ParallelAttention(ParallelModule):
    """Causal self-attention over packed sequences, with rotary positions and grouped key-value heads.

    Rank r of tp computes query heads [r Q, (r+1) Q) and their key-value heads, which can be replicated.

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` of the output / one of the
    input's gradient. With sequence parallelism: all-gather `[T, H]` and reduce-scatter / the same pair in reverse, and
    one more all-gather of the input. A context-parallel group adds the communication of `ulysses_attention` or
    `ring_attention`. `qk_norm` adds an all-reduce of each norm weight's gradient; "full" adds an all-reduce `[T]` each
    way for queries and for keys.

    Args:
        config: The description of the layer, without `latent`.
        placement: The groups of the layer and its tokens.
        execution: The execution of the linear layers.
        context_group: Context-parallel group; None: every rank has all tokens. Sum the parameters' gradients over the
            group, as over data-parallel ranks.
        dtype: dtype of the parameters.
        device: Device of the parameters.

    Raises:
        ValueError: The config has `latent`, or the heads do not divide over the group.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        context_group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if config.latent is not None:
            raise ValueError("the config describes multi-head latent attention; use ParallelLatentAttention")
        assert config.head_dim is not None  # set by the config
        heads, kv_heads, head_dim, group = config.num_heads, config.num_kv_heads, config.head_dim, placement.group
        self.q_norm: RMSNorm | HeadShardedRMSNorm | None
        self.k_norm: RMSNorm | HeadShardedRMSNorm | None
        self.sinks: nn.Parameter | None
        self.head_dim, self.rotary_interleaved = head_dim, config.rotary_interleaved
        self.attend = attention_over(context_group, config)
        self.options = config.attention_options
        linear: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        self.shared_kv, self.window = config.shared_kv, config.window
        num_parts = 1 if config.shared_kv == "reuse" else 2 if config.keys_as_values else 3
        self.gated = config.output_gate
        self.value_norm_eps = config.norm_eps if config.value_norm else None
        self.qkv_proj = QKVParallelLinear(
            *(config.hidden_size, heads, kv_heads, head_dim),
            parts=num_parts,
            gated=config.output_gate,
            bias=config.attention_bias,
            **linear,
        )
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, bias=config.output_bias, **linear)
        self.num_heads_local = self.qkv_proj.num_heads_local
        self.num_kv_heads_local = self.qkv_proj.num_kv_heads_local
        self.q_norm = self.k_norm = None
        norm: dict[str, Any] = {"eps": config.norm_eps, "group": group, "dtype": dtype, "device": device}
        if config.qk_norm == "head":  # ranks norm different heads with the same weight, so its gradient is reduced
            norm |= {"unit_offset": config.norm_unit_offset, "sequence_parallel": True}
            self.q_norm = RMSNorm(head_dim, **norm)
            self.k_norm = RMSNorm(head_dim, **norm) if num_parts > 1 else None
        elif config.qk_norm == "full":
            self.q_norm, self.k_norm = (HeadShardedRMSNorm(count, head_dim, **norm) for count in (heads, kv_heads))
        self.sinks = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(self.num_heads_local, dtype=dtype, device=device))
            if group is not None:
                set_sharding(self, "sinks", shard_evenly([heads], group, 0, "num_heads"))

    def reset_parameters(self) -> None:
        """Set the sinks to 0; projections and norms have their own `reset_parameters`."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of a token's cache entry."""
        return CacheShape(self.num_kv_heads_local, self.head_dim, self.head_dim)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, ...] | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: LayerCache | None = None,
        shared_keys: SharedKeys | None = None,
        stored_kv: SharedKeysValues | None = None,
    ) -> Tensor:
        """Attend within each segment.

        Args:
            hidden: `[T', H]`.
            rotary: `RotaryEmbedding.tables` for all T tokens: cos and sin `[T, D]`, and where the rope parameters scale
                queries their factors `[T]`. None: no rotation.
            cu_seqlens: `[S+1]` int32 boundaries of the segments among all T tokens, of all context-parallel ranks.
            max_seqlen: Upper bound of a segment's length.
            cache: Keys and values of earlier tokens; the keys and values of these tokens are added. With a cache every
                context-parallel rank gets all T tokens. A layer that reuses keys and values takes the cache of theirs.
            shared_keys: The tokens to which each segment attends; None: its own.
            stored_kv: Keys and values that layers share; the same object for all layers of a forward.

        Returns:
            `[T', H]`.

        Raises:
            ValueError: Shared keys come with a cache, or with context parallelism.
        """
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        sizes = [size // self.head_dim for size in self.qkv_proj.local_sizes]
        gate = None
        if self.q_norm is None and rotary is not None and len(sizes) == 3 and not self.gated:
            q, k, v = split_and_rotate(qkv, self.num_kv_heads_local, *rotary[:2], interleaved=self.rotary_interleaved)
        else:
            q, *keys_values = qkv.split(sizes, dim=1)
            if self.gated:
                q, gate = q.unflatten(1, (-1, 2)).unbind(2)
            q = q if self.q_norm is None else self.q_norm(q)
            if not keys_values:
                assert stored_kv is not None
                q = q if rotary is None else apply_rotary(q, *rotary[:2], interleaved=self.rotary_interleaved)
                k, v = stored_kv.of(self.window)
            else:
                k, v = keys_values[0], keys_values[-1]
                k = k if self.k_norm is None else self.k_norm(k)
                if rotary is not None:
                    q, k = rotate_queries_and_keys(q, k, *rotary[:2], interleaved=self.rotary_interleaved)
                if self.value_norm_eps is not None:
                    v = rms_norm(v, None, eps=self.value_norm_eps)
        if self.shared_kv == "store" and stored_kv is not None:
            stored_kv.store(self.window, k, v)
        if rotary is not None and len(rotary) == 3:
            q = q * rotary[2].to(q.dtype)[:, None, None]
        options: AttentionOptions = {**self.options, "sinks": self.sinks}
        attend = attention_of_call(self.attend, cache, shared_keys)
        attended = attend(q, k, v, cu_seqlens, max_seqlen, **options)
        return self.o_proj((attended if gate is None else attended * gate.sigmoid()).flatten(1))
