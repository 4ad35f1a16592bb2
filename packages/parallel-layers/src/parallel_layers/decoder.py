"""`DecoderLayer`: the layer of every decoder, described by a `DecoderConfig`.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden,
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
    """Names of the norms before and after attention and before and after the MLP; None: no norm."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


# The names are those of Hugging Face's modules. `post_attention_layernorm` norms the input of the MLP for "pre", and
# the output of attention before the residual addition for "post" and "sandwich".
NORM_PLACEMENTS: dict[str, _Norms] = {
    "pre": _Norms("input_layernorm", None, "post_attention_layernorm", None),
    "post": _Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": _Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and variants of a decoder layer. The defaults are Llama's.

    Attributes:
        hidden_size: H.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; divides num_heads. Equal to num_heads with `latent`.
        head_dim: Size of a head; None: hidden_size // num_heads, or the size that `latent` gives.
        intermediate_size: Intermediate size of the MLP.
        activation: See `ParallelMLP`.
        gated_mlp: True: act(gate) · up (SwiGLU, GeGLU). False: act(up).
        mlp_bias: The MLP's projections have biases.
        latent: Sizes of multi-head latent attention (DeepSeek); None: ordinary attention.
        attention_bias: The projections of queries, keys and values (Qwen2) or to the latents have biases.
        output_bias: The attention's output projection has a bias.
        qk_norm: "head" (Qwen3), "full" (OLMo-2) or None.
        window: Sliding window in tokens; None: no window. Layers of one model can have different configs.
        attention_scale: Factor of the scores; None: 1/sqrt(head_dim).
        attention_softcap: Soft-cap of the scores (Gemma 2); None: no cap.
        attention_sinks: Attention has learned sinks (gpt-oss).
        rotary_interleaved: Rotate pairs of neighbouring dims (GLM, DeepSeek); see `apply_rotary`.
        attention_backend: See `packed_attention`.
        context_parallel: "ulysses" or "ring"; used with a context-parallel group.
        moe: Mixture of experts in place of the MLP, with its own sizes and activation; None: an MLP.
        norm_eps: Epsilon of every RMSNorm.
        norm_unit_offset: Norm weights are stored as differences from one (Gemma).
        norm_placement: "pre": before attention and MLP (Llama). "post": after each, before the residual addition
            (OLMo-2). "sandwich": both (Gemma 2).
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
    norm_placement: NormPlacement = "pre"

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent sizes."""
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
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; use a divisor of "
                "num_heads"
            )
        if self.norm_placement not in NORM_PLACEMENTS:
            raise ValueError(
                f"norm_placement={self.norm_placement!r} is unknown; use one of {', '.join(NORM_PLACEMENTS)}"
            )

    def _check_latent(self, latent: LatentConfig) -> None:
        """Raise ValueError for options that multi-head latent attention does not support."""
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

    Submodules: `self_attn` (a `ParallelAttention` or `ParallelLatentAttention`), `mlp` (a `ParallelMLP` or `MoE`) and
    norms with Hugging Face's names: `input_layernorm`, `post_attention_layernorm`, `pre_feedforward_layernorm`,
    `post_feedforward_layernorm`. Communication: that of the submodules; sequence parallelism adds an all-reduce of each
    norm weight's gradient in the backward.

    Args:
        config: The description of the layer.
        placement: The groups of the layer and its tokens. Under sequence parallelism hidden states are `[T/tp, H]`.
        execution: The execution of the linear layers.
        context_group: Context-parallel group; None: this rank has all tokens.
        layer_number: The layer's number in the model, the key in a `RoutingContext`.
        expert_group: Ranks that divide the experts; None: this rank has all experts. See `MoE`.
        expert_tensor_parallel: Divide every expert over the placement's group. See `MoE`.
        dtype: dtype of the parameters.
        device: Device of the parameters.
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
                config.hidden_size, eps=config.norm_eps, unit_offset=config.norm_unit_offset, group=placement.group,
                sequence_parallel=placement.sequence_parallel, dtype=dtype, device=device,
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
        """Compute the layer.

        Args:
            hidden: `[T', H]`.
            rotary: (cos, sin) `[T, D]` of `RotaryEmbedding` for all T tokens; None: no rotation.
            cu_seqlens: `[S+1]` int32 boundaries among all T tokens.
            max_seqlen: Upper bound of a segment's length.
            cache: `PagedKVCache.layer(i)` for inference, of the shape `self_attn.cache_shape`.
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
