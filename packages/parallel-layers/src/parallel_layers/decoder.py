"""`DecoderLayer`: one layer for every decoder, told apart by a config.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (T without), H hidden,
D rotary dims, S segments.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.attention.latent import LatentConfig, ParallelLatentAttention
from parallel_layers.attention.layer import AttentionCache, ContextParallel, ParallelAttention, QKNorm
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.mlp.layer import GatedActivation, ParallelMLP
from parallel_layers.moe import MoE, MoEConfig, RoutingContext
from parallel_layers.norm.rms_norm import RMSNorm

NormPlacement = Literal["pre", "post", "sandwich"]


class _Norms(NamedTuple):
    """Names of the norms before and after attention and before and after the MLP; None where there is none."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


# By the names of Hugging Face's modules. `post_attention_layernorm` comes after attention in every one of them, but for
# "pre" that is on the way into the MLP, and for the others on the way out of attention, before the residual is added.
NORM_PLACEMENTS: dict[str, _Norms] = {
    "pre": _Norms("input_layernorm", None, "post_attention_layernorm", None),
    "post": _Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": _Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What tells one decoder layer from another. The defaults are Llama's.

    Attributes:
        hidden_size: H.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; divides num_heads. With `latent`, num_heads.
        head_dim: Size of a head; None: hidden_size // num_heads, or with `latent` what that says.
        intermediate_size: Of the MLP.
        activation: See `ParallelMLP`.
        gated_mlp: act(gate) · up (SwiGLU, GeGLU), or act(up) alone.
        mlp_bias: Biases in the MLP.
        latent: Multi-head latent attention (DeepSeek) in the place of the ordinary, with its own sizes; None: ordinary.
        attention_bias: Bias of the query, key and value projections (Qwen2), or of those to the latents.
        output_bias: Bias of the attention's output projection.
        qk_norm: "head" (Qwen3), "full" (OLMo-2) or None.
        window: Sliding window in tokens; None: all. Models that alternate give their layers different configs.
        attention_scale: Factor of the scores; None: 1/sqrt(head_dim).
        attention_softcap: Bound of the scores (Gemma 2); None: no bound.
        attention_sinks: Learned sink scores (gpt-oss).
        rotary_interleaved: Rotate pairs of neighbouring dims (GLM, DeepSeek); see `apply_rotary`.
        attention_backend: See `packed_attention`.
        context_parallel: "ulysses" or "ring", when the layer is given a context-parallel group.
        moe: A mixture of experts in the place of the MLP, with its own sizes and activation; None: the MLP.
        norm_eps: Of every RMSNorm.
        norm_unit_offset: Norm weights are stored as differences from one (Gemma).
        norm_backend: Of the norms of hidden states; see `RMSNorm`.
        norm_placement: "pre" before attention and MLP (Llama), "post" after each, before the residual is added
            (OLMo-2), "sandwich" both (Gemma 2).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int | None = None
    activation: GatedActivation = "silu"
    gated_mlp: bool = True
    mlp_bias: bool = False
    latent: LatentConfig | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    window: int | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    rotary_interleaved: bool = False
    attention_backend: str = "auto"
    context_parallel: ContextParallel = "ulysses"
    moe: MoEConfig | None = None
    norm_eps: float = 1e-6
    norm_unit_offset: bool = False
    norm_backend: str = "auto"
    norm_placement: NormPlacement = "pre"

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit, naming them."""
        if self.latent is not None:
            self._check_latent(self.latent)
            object.__setattr__(self, "head_dim", self.latent.qk_head_dim)
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}; pass head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; every key-value "
                "head is read by the same number of query heads"
            )
        if self.norm_placement not in NORM_PLACEMENTS:
            raise ValueError(
                f"norm_placement={self.norm_placement!r} is unknown; use one of {', '.join(NORM_PLACEMENTS)}"
            )

    def _check_latent(self, latent: LatentConfig) -> None:
        """Raise ValueError for what multi-head latent attention does not have."""
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}, but latent attention makes keys and values for each of "
                f"num_heads={self.num_heads}; pass num_kv_heads={self.num_heads}"
            )
        if self.head_dim not in (None, latent.qk_head_dim):
            raise ValueError(
                f"head_dim={self.head_dim}, but the heads of latent attention have qk_nope_head_dim="
                f"{latent.qk_nope_head_dim} + qk_rope_head_dim={latent.qk_rope_head_dim} dims; leave head_dim out"
            )
        if self.qk_norm is not None or self.attention_sinks:
            raise ValueError(
                f"qk_norm={self.qk_norm!r} and attention_sinks={self.attention_sinks} are of ordinary attention; leave "
                "them out with latent=..."
            )


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norms and a residual connection.

        h = x + norm_out(attention(norm_in(x)))
        y = h + norm_out(mlp(norm_in(h)))            (norms by `DecoderConfig.norm_placement`)

    Submodules: `self_attn` (`qkv_proj`, `o_proj`, with QK-norm `q_norm` and `k_norm`; with `latent` those of
    `ParallelLatentAttention`), `mlp` (`gate_up_proj` or `up_proj`, `down_proj`; as a mixture of experts `gate`,
    `experts`, `shared_experts`) and the norms by Hugging Face's names: `input_layernorm`, `post_attention_layernorm`,
    `pre_feedforward_layernorm`, `post_feedforward_layernorm`. Communication: that of `ParallelAttention` (or
    `ParallelLatentAttention`) and of `ParallelMLP` or `MoE`, and in the backward under sequence parallelism one
    all-reduce of each norm weight's gradient.

    Args:
        config: What the layer is.
        placement: Where the parts of the layer are. Under sequence parallelism hidden states are `[T/tp, H]`.
        execution: How the linear layers compute and communicate.
        context_group: Context-parallel group, over which the pack's tokens are sharded; None: all tokens are here.
        layer_number: The layer's number in the model, by which a `RoutingContext` knows it.
        expert_group: The ranks that share the experts of a mixture of experts; None: all are here. See `MoE`.
        expert_tensor_parallel: Every expert is divided over the placement's group. See `MoE`.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        context_group: ProcessGroup | None = None,
        layer_number: int = 0,
        expert_group: ProcessGroup | None = None,
        expert_tensor_parallel: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        assert config.head_dim is not None  # filled in by the config
        self.config = config
        self.norms = NORM_PLACEMENTS[config.norm_placement]
        how: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        for name in filter(None, self.norms):
            norm = RMSNorm(
                config.hidden_size, eps=config.norm_eps, unit_offset=config.norm_unit_offset,
                backend=config.norm_backend, group=placement.group, sequence_parallel=placement.sequence_parallel,
                dtype=dtype, device=device,
            )  # fmt: skip
            self.add_module(name, norm)
        attention: dict[str, Any] = {
            "bias": config.attention_bias,
            "output_bias": config.output_bias,
            "window": config.window,
            "scale": config.attention_scale,
            "softcap": config.attention_softcap,
            "rotary_interleaved": config.rotary_interleaved,
            "backend": config.attention_backend,
            "context_parallel": config.context_parallel,
            "context_group": context_group,
        }
        self.self_attn: ParallelAttention | ParallelLatentAttention
        if config.latent is None:
            self.self_attn = ParallelAttention(
                config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
                qk_norm=config.qk_norm, norm_eps=config.norm_eps, norm_unit_offset=config.norm_unit_offset,
                sinks=config.attention_sinks, **attention, **how,
            )  # fmt: skip
        else:
            self.self_attn = ParallelLatentAttention(
                config.hidden_size, config.num_heads, config.latent, **attention, **how
            )
        self.mlp: ParallelMLP | MoE
        if config.moe is None:
            self.mlp = ParallelMLP(
                config.hidden_size, config.intermediate_size,
                activation=config.activation, gated=config.gated_mlp, bias=config.mlp_bias, **how,
            )  # fmt: skip
        else:
            self.mlp = MoE(
                config.hidden_size, config.moe,
                layer_number=layer_number, expert_group=expert_group, expert_tensor_parallel=expert_tensor_parallel,
                **how,
            )  # fmt: skip

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: AttentionCache | None = None,
        routing: RoutingContext | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            hidden: `[T', H]`.
            rotary: (cos, sin) `[T, D]` for all T tokens, from `RotaryEmbedding` (with `latent` one of
                `qk_rope_head_dim` dims); None: no rotation.
            cu_seqlens: `[S+1]` int32 boundaries among all T tokens.
            max_seqlen: At least the longest segment.
            cache: `KVCache.layer(i)` for inference, of the shape `self_attn.cache_shape`.
            routing: Padding, replay and reports of a mixture of experts; see `MoE.forward`.

        Returns:
            `[T', H]`.
        """
        x = hidden
        if self.norms.attention_in is not None:
            x, hidden = getattr(self, self.norms.attention_in).norm_and_keep(hidden)
        x = self.self_attn(x, rotary, cu_seqlens, max_seqlen, cache)
        x = self._norm(self.norms.attention_out, x)
        if self.norms.mlp_in is None:
            hidden = hidden + x
            x = hidden
        else:
            x, hidden = getattr(self, self.norms.mlp_in).add_and_norm(x, hidden)
        x = self.mlp(x, routing) if isinstance(self.mlp, MoE) else self.mlp(x)
        return hidden + self._norm(self.norms.mlp_out, x)
