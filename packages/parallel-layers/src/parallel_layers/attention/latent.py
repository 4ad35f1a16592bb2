"""`ParallelLatentAttention`: multi-head latent attention, heads sharded over the group.

https://arxiv.org/abs/2405.04434 (DeepSeek-V2, section 2.1) and https://arxiv.org/abs/2412.19437 (DeepSeek-V3).

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (T without), H hidden,
Q heads of this rank, A rank of the queries' latent, C rank of the keys' and values' latent, N dims of a head without
rotation, R dims with it, V dims of a value head, S segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.layer import AttentionCache, CacheShape, ContextParallel, attention_over
from parallel_layers.attention.packed import AttentionOptions, packed_attention
from parallel_layers.distributed.collectives import copy_to_tensor_parallel, gather_from_sequence_parallel
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import ColumnParallelLinear, LinearOptions, ReplicatedLinear, RowParallelLinear
from parallel_layers.norm.rms_norm import RMSNorm
from parallel_layers.parallel_module import ParallelModule
from parallel_layers.rotary import rotate_queries_and_keys
from parallel_layers.sharding import divide


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The sizes of multi-head latent attention, by the names of Hugging Face configs.

    Attributes:
        kv_lora_rank: C, of the latent that keys and values are made from.
        qk_nope_head_dim: N, dims of a query or key head that are not rotated.
        qk_rope_head_dim: R, dims that are; all heads share one such key.
        v_head_dim: V, of a value head.
        q_lora_rank: A, of the latent that queries are made from; None: they are projected in one step.
        norm_eps: Of the norms of the latents, which have the modelling code's default and not the config's.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """N + R, of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class ParallelLatentAttention(ParallelModule):
    """Causal self-attention over packed sequences whose keys and values are made from one short latent a token.

        [c, k_R] = kv_a_proj_with_mqa(x),   [k_N, v] of each head = kv_b_proj(norm(c))
        [q_N, q_R] of each head = q_b_proj(norm(q_a_proj(x)))    (q_proj(x) without `q_lora_rank`)
        k = [k_N, rotated k_R],   q = [q_N, rotated q_R],   o_proj(attention(q, k, v))

    Submodules by Hugging Face's names: `q_a_proj`, `q_a_layernorm`, `q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa`,
    `kv_a_layernorm`, `kv_b_proj`, `o_proj`. The projections to the latents and their norms are whole on every rank; of
    the others rank r of n has heads [r Q, (r+1) Q).

    Communication, forward / backward. Without sequence parallelism: one all-reduce `[T, H]` after the output projection
    / one of the latents' gradients `[T, A + C + R]`. With it every rank compresses its own tokens: all-gather
    `[T, A + C + R]` and reduce-scatter `[T, H]` / the same pair in reverse, and an all-reduce of the gradients of the
    whole parameters. Without `q_lora_rank`, A is absent and the queries' projection sends what a `ColumnParallelLinear`
    does. With a context-parallel group, what its attention sends.

    A cache holds only the latents and rotated keys, `[1, C + R]` a token, whatever the number of heads. As long as it
    is empty, the tokens attend to each other as without one. Then each head's half of `kv_b_proj` is multiplied into
    the queries and out of the outputs, so that the latents themselves are keys and values of a single head (section
    2.1.2): a decoding step reads each latent once for all heads, and multiplies (2 C + R) / (N + R + V) times as much
    as with expanded keys and values.

    Args:
        hidden_size: H.
        num_heads: Heads of all ranks.
        sizes: A, C, N, R and V.
        bias: Biases of the projections to the latents.
        output_bias: Bias of the output projection.
        window: Sliding window in tokens, a token's own included; None: all.
        scale: Of the scores; None: 1/sqrt(N + R). DeepSeek's under YaRN: `parallel_layers.rotary.yarn_softmax_scale`.
        softcap: Bound of the scores; None: no bound.
        rotary_interleaved: See `apply_rotary`. DeepSeek's checkpoints are.
        backend: See `packed_attention`.
        context_parallel: See `ParallelAttention`.
        context_group: See `ParallelAttention`.
        placement: Where the parts of the layer and of its tokens are.
        execution: How the linear layers compute and communicate.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ValueError: The heads do not divide over the group.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentConfig,
        *,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rotary_interleaved: bool = True,
        backend: str = "auto",
        context_parallel: ContextParallel = "ulysses",
        context_group: ProcessGroup | None = None,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.q_a_proj: ReplicatedLinear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        self.sizes, self.rotary_interleaved = sizes, rotary_interleaved
        self.placement, self.execution = placement, execution
        self.num_heads_local = divide(num_heads, placement.tp, "num_attention_heads")
        self.attend: Callable[..., Tensor] = attention_over(context_group, context_parallel)
        scale = sizes.qk_head_dim**-0.5 if scale is None else scale  # of latents 1/sqrt(size) would be another
        self.options: AttentionOptions = {"window": window, "scale": scale, "softcap": softcap, "backend": backend}
        linear: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        norm = partial(
            RMSNorm, eps=sizes.norm_eps, group=placement.group, sequence_parallel=placement.sequence_parallel,
            dtype=dtype, device=device,
        )  # fmt: skip
        # All ranks have the latents. Their gradient is reduced once for both projections, where they were shared.
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
        self.o_proj = RowParallelLinear(num_heads * sizes.v_head_dim, hidden_size, bias=output_bias, **linear)

    @property
    def cache_shape(self) -> CacheShape:
        """What a cache keeps of a token: the latent, which is also the value, and behind it the rotated key."""
        rank = self.sizes.kv_lora_rank
        return CacheShape(1, rank + self.sizes.qk_rope_head_dim, rank, values_in_keys=True)

    def _share(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Every rank's rows `[T', ...]` as all rows `[T, ...]`, with one exchange of all parts each way."""
        if self.placement.sharded is None:
            return parts
        together = torch.cat(parts, dim=-1)
        share = gather_from_sequence_parallel if self.placement.sequence_parallel else copy_to_tensor_parallel
        whole = share(together, self.placement.group, reduce_dtype=self.execution.reduce_dtype)
        return whole.split([part.shape[-1] for part in parts], dim=-1)

    def _queries_and_latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query heads `[T, Q, N + R]`, normed latents `[T, C]` and the shared key part `[T, R]`, not yet rotated."""
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
        rotary: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Attend within each segment; as `ParallelAttention.forward`, with cos and sin `[T, R]`.

        A `cache` has the shape `cache_shape`.
        """
        sizes = self.sizes
        query, latent, key = self._queries_and_latents(hidden)
        q_nope, q_rope = query.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        k_rope = key[:, None]
        if rotary is not None:
            q_rope, k_rope = rotate_queries_and_keys(q_rope, k_rope, *rotary, interleaved=self.rotary_interleaved)
        attend = self.attend
        if cache is not None:
            latents = latent[:, None]
            stored = torch.cat((latents, k_rope), dim=-1)
            if not cache.is_empty:
                return self.o_proj(
                    self._attend_to_latents(cache, q_nope, q_rope, stored, latents, cu_seqlens, max_seqlen)
                )
            cache.store(stored, latents, cu_seqlens, max_seqlen)
            attend = packed_attention
        k_nope, value = (
            self.kv_b_proj(latent)
            .unflatten(-1, (self.num_heads_local, -1))
            .split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        )
        query = torch.cat((q_nope, q_rope), dim=-1)
        keys = torch.cat((k_nope, k_rope.expand(-1, self.num_heads_local, -1)), dim=-1)
        return self.o_proj(attend(query, keys, value, cu_seqlens, max_seqlen, **self.options).flatten(1))

    def _attend_to_latents(
        self,
        cache: AttentionCache,
        q_nope: Tensor,
        q_rope: Tensor,
        keys: Tensor,
        values: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        """q_N · (W_K c) = (W_Kᵀ q_N) · c, and Σ p (W_V c) = W_V Σ p c: heads' outputs `[T, Q · V]`."""
        assert self.kv_b_proj.weight is not None
        heads = self.kv_b_proj.weight.unflatten(0, (self.num_heads_local, -1))
        to_keys, to_values = heads.split([self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], dim=1)
        query = torch.cat((torch.einsum("tqn,qnc->tqc", q_nope, to_keys), q_rope), dim=-1)
        out = cache.attend(query, keys, values, cu_seqlens, max_seqlen, **self.options)
        return torch.einsum("tqc,qvc->tqv", out, to_values).flatten(1)
