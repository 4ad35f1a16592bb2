"""`ParallelLatentAttention`: multi-head latent attention with heads sharded over the group.

https://arxiv.org/abs/2405.04434 (DeepSeek-V2, section 2.1) and https://arxiv.org/abs/2412.19437 (DeepSeek-V3).

Shape legend: as in `layer`, with one key-value head for each of Q query heads, and the sizes A, C, N, R and V of
`LatentConfig`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.cache import CacheShape, LayerCache
from parallel_layers.attention.config import AttentionConfig
from parallel_layers.attention.layer import attention_of_call, attention_over
from parallel_layers.attention.packed import packed_attention
from parallel_layers.attention.shared_keys import SharedKeys
from parallel_layers.distributed.collectives import copy_to_tensor_parallel, gather_from_sequence_parallel
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import ColumnParallelLinear, LinearOptions, ReplicatedLinear, RowParallelLinear
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.sharding import divide
from parallel_layers.norm.rms import RMSNorm
from parallel_layers.rotary.rotation import rotate_queries_and_keys


class ParallelLatentAttention(ParallelModule):
    """Causal self-attention over packed sequences, with keys and values projected from one short latent per token.

        [c, k_R] = kv_a_proj_with_mqa(x),   [k_N, v] of each head = kv_b_proj(norm(c))
        [q_N, q_R] of each head = q_b_proj(norm(q_a_proj(x)))    (q_proj(x) without `q_lora_rank`)
        k = [k_N, rotated k_R],   q = [q_N, rotated q_R],   o_proj(attention(q, k, v))

    Submodules have Hugging Face's names. The projections to the latents and their norms are replicated; in the other
    projections rank r has heads [r Q, (r+1) Q).

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` of the output / one
    all-reduce `[T, A + C + R]` of the latents' gradients. With sequence parallelism: all-gather `[T, A + C + R]` and
    reduce-scatter `[T, H]` / the same pair in reverse, and an all-reduce of the replicated parameters' gradients.
    Without `q_lora_rank`, A is 0 and `q_proj` is a `ColumnParallelLinear`. A context-parallel group adds the
    communication of `ulysses_attention` or `ring_attention`.

    A cache holds only the latents and rotated keys, `[1, C + R]` per token for all heads. While the cache is empty, the
    tokens attend to each other as without a cache. Afterwards `kv_b_proj` is multiplied into the queries and the
    outputs, so that the latents are the keys and values of a single head (section 2.1.2). In the view of
    `tp_invariant`, where `absorbs` is False, a cache holds the keys and values of all heads.

    Args:
        config: The description of the layer, with `latent`. DeepSeek's checkpoints need `rotary_interleaved`. See
            `ParallelAttention` for the other arguments.

    Raises:
        ValueError: The config has no `latent`, or `num_heads` is not divisible by the group's size.
    """

    absorbs = True
    """Attention to a cache multiplies `kv_b_proj` into queries and outputs, so a cache holds latents."""

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
        if config.latent is None:
            raise ValueError("latent=None; give the sizes as AttentionConfig(latent=LatentConfig(...))")
        self.q_a_proj: ReplicatedLinear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        hidden_size, num_heads, bias = config.hidden_size, config.num_heads, config.attention_bias
        self.sizes = sizes = config.latent
        self.rotary_interleaved = config.rotary_interleaved
        self.placement, self.execution = placement, execution
        self.num_heads_local = divide(num_heads, placement.tp, "num_attention_heads")
        self.attend = attention_over(context_group, config)
        self.options = config.attention_options
        linear: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        norm = partial(
            RMSNorm, eps=sizes.norm_eps, group=placement.group, sequence_parallel=placement.sequence_parallel,
            dtype=dtype, device=device,
        )  # fmt: skip
        # The latents' gradient is reduced once for both projections, in `_share`.
        heads: LinearOptions = {"placement": Placement(placement.group), "dtype": dtype, "device": device}
        query_rows = num_heads * sizes.qk_head_dim
        if sizes.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, query_rows, **linear)
        else:
            self.q_a_proj = ReplicatedLinear(hidden_size, sizes.q_lora_rank, bias=bias, **linear)
            self.q_a_layernorm = norm(sizes.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(sizes.q_lora_rank, query_rows, reduce_gradient=False, **heads)
        latent = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, latent, bias=bias, **linear)
        self.kv_a_layernorm = norm(sizes.kv_lora_rank)
        self.kv_b_proj = ColumnParallelLinear(
            sizes.kv_lora_rank, num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), reduce_gradient=False, **heads
        )
        self.o_proj = RowParallelLinear(num_heads * sizes.v_head_dim, hidden_size, bias=config.output_bias, **linear)

    @property
    def cache_shape(self) -> CacheShape:
        """The cache entry of a token: the latent, which is also the value, followed by the rotated key."""
        rank = self.sizes.kv_lora_rank
        if not self.absorbs:
            return CacheShape(self.num_heads_local, self.sizes.qk_head_dim, self.sizes.v_head_dim)
        return CacheShape(1, rank + self.sizes.qk_rope_head_dim, rank, values_in_keys=True)

    def _share(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather the ranks' rows `[T', ...]` to `[T, ...]`, in one exchange for all parts each way."""
        if self.placement.sharded is None:
            return tensors
        joined = torch.cat(tensors, dim=-1)
        share = gather_from_sequence_parallel if self.placement.sequence_parallel else copy_to_tensor_parallel
        gathered = share(joined, self.placement.group, reduce_dtype=self.execution.reduce_dtype)
        return gathered.split([tensor.shape[-1] for tensor in tensors], dim=-1)

    def _queries_and_latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return unrotated queries `[T, Q, N + R]`, normed latents `[T, C]` and the keys' shared part `[T, R]`."""
        latent, key = self.kv_a_proj_with_mqa(hidden).split(
            [self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim], dim=-1
        )
        latent = self.kv_a_layernorm(latent)
        if self.q_a_proj is None or self.q_a_layernorm is None:
            latent, key = self._share(latent, key)
            query = self.q_proj(hidden)
        else:
            query, latent, key = self._share(self.q_a_layernorm(self.q_a_proj(hidden)), latent, key)
            query = self.q_b_proj(query)
        return query.unflatten(-1, (self.num_heads_local, -1)), latent, key

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, ...] | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: LayerCache | None = None,
        shared_keys: SharedKeys | None = None,
    ) -> Tensor:
        """Attend within each segment; see `ParallelAttention.forward`. cos and sin are `[T, R]`."""
        sizes = self.sizes
        query, latent, key = self._queries_and_latents(hidden)
        q_nope, q_rope = query.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        k_rope = key[:, None]
        if rotary is not None:
            q_rope, k_rope = rotate_queries_and_keys(q_rope, k_rope, *rotary, interleaved=self.rotary_interleaved)
        attend = attention_of_call(self.attend, cache, shared_keys)
        if cache is not None and self.absorbs:
            values = latent[:, None]
            keys = torch.cat((values, k_rope), dim=-1)
            if not cache.starts(cu_seqlens):
                # q_N · (W_K c) = (W_Kᵀ q_N) · c and Σ p (W_V c) = W_V Σ p c
                heads = self.kv_b_proj.effective_weight().unflatten(0, (self.num_heads_local, -1))
                to_keys, to_values = heads.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=1)
                query = torch.cat((torch.einsum("tqn,qnc->tqc", q_nope, to_keys), q_rope), dim=-1)
                out = cache.attend(query, keys, values, cu_seqlens, max_seqlen, **self.options)
                return self.o_proj(torch.einsum("tqc,qvc->tqv", out, to_values).flatten(1))
            cache.store(keys, values, cu_seqlens)
            attend = packed_attention
        k_nope, value = (
            self.kv_b_proj(latent)
            .unflatten(-1, (self.num_heads_local, -1))
            .split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        )
        query = torch.cat((q_nope, q_rope), dim=-1)
        keys = torch.cat((k_nope, k_rope.expand(-1, self.num_heads_local, -1)), dim=-1)
        return self.o_proj(attend(query, keys, value, cu_seqlens, max_seqlen, **self.options).flatten(1))
