"""`AttentionConfig` and `LatentConfig`: the descriptions of an attention layer."""

from dataclasses import dataclass
from typing import Literal, get_args

from parallel_layers.attention.context_parallel.sequence_layout import Layout, layout_of
from parallel_layers.attention.packed import AttentionOptions
from parallel_layers.model.options import ContextParallel

QKNorm = Literal["head", "full"]
SharedKV = Literal["store", "reuse"]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The sizes of multi-head latent attention, with the names of Hugging Face configs.

    Attributes:
        kv_lora_rank: C, the size of the key-value latent.
        qk_nope_head_dim: N, the unrotated dims of a query or key head.
        qk_rope_head_dim: R, the rotated dims of a query or key head; all heads share the rotated part of the key.
        v_head_dim: V, the size of a value head.
        q_lora_rank: A, the size of the query latent; None: queries have one projection and no latent.
        norm_eps: Epsilon of the latents' norms. transformers uses the modelling code's default, not the config's.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """The size N + R of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The sizes and variants of an attention layer. The defaults are Llama's.

    Attributes:
        hidden_size: H.
        num_heads: Query heads over all ranks.
        num_kv_heads: Key-value heads over all ranks; divides num_heads. Equal to num_heads with `latent`.
        head_dim: Size of a head; None: hidden_size // num_heads, or the size that `latent` gives.
        latent: Sizes of multi-head latent attention (DeepSeek); None: ordinary attention.
        attention_bias: The projections of queries, keys and values (Qwen2) or to the latents have biases.
        output_bias: The output projection has a bias.
        qk_norm: RMSNorm of queries and keys before the rotation: "head" over each head (Qwen3), "full" over all heads
            together (OLMo-2), None: no norm.
        norm_eps: Epsilon of the norms of `qk_norm`.
        norm_unit_offset: Weights of these norms are differences from one (Gemma; "head" only).
        value_norm: RMSNorm without a weight over each value head (Gemma 4).
        keys_as_values: Values are the projected keys, before their norm and rotation; there is no projection of values
            (Gemma 4).
        shared_kv: "store": later layers attend to the keys and values of this layer. "reuse": the layer attends to
            the keys and values of the last "store" layer with the same window and has no projections for them (Gemma 4
            E2B and E4B). None: neither.
        output_gate: The projection of queries has two parts for each head, its query and a gate; the head's output is
            multiplied by the sigmoid of the gate (Qwen3-Next; https://arxiv.org/abs/2505.06708).
        window: Sliding window in tokens, including the token itself; None: no window.
        attention_scale: Factor of the scores; None: 1/sqrt(head_dim). For YaRN with `latent` see
            `parallel_layers.rotary.yarn_softmax_scale`.
        attention_softcap: Soft-cap of the scores (Gemma 2); None: no cap.
        attention_sinks: Attention sinks (gpt-oss), one learned score per head in the softmax's denominator.
        rotary_interleaved: Rotate pairs of neighbouring dims (GLM, DeepSeek); see `apply_rotary`.
        attention_backend: See `packed_attention`.
        context_parallel: The form of context parallelism: "ulysses" or "heads" (contiguous layout), or "ring" (zigzag).
            Attention by "heads" is "ulysses"; see `GatedDeltaNet` for recurrent layers.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    latent: LatentConfig | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    norm_eps: float = 1e-6
    norm_unit_offset: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    shared_kv: SharedKV | None = None
    output_gate: bool = False
    window: int | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    rotary_interleaved: bool = False
    attention_backend: str = "auto"
    context_parallel: ContextParallel = "ulysses"

    def __post_init__(self) -> None:
        if self.latent is not None:
            self._check_latent(self.latent)
            object.__setattr__(self, "head_dim", self.latent.qk_head_dim)
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_heads}; give "
                    "head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.qk_norm not in (None, *get_args(QKNorm)):
            raise ValueError(f"qk_norm={self.qk_norm!r} is unknown; use 'head' (Qwen3), 'full' (OLMo-2) or None")
        if self.context_parallel not in get_args(ContextParallel):
            raise ValueError(f"context_parallel={self.context_parallel!r} is unknown; use 'ulysses', 'ring' or 'heads'")

    def _check_latent(self, latent: LatentConfig) -> None:
        """Raise ValueError for options that multi-head latent attention does not support."""
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_kv_heads}, but latent attention makes keys and values for each of "
                f"num_attention_heads={self.num_heads}; use the same number for both"
            )
        if self.head_dim not in (None, latent.qk_head_dim):
            raise ValueError(
                f"head_dim={self.head_dim}, but the heads of latent attention have qk_nope_head_dim="
                f"{latent.qk_nope_head_dim} + qk_rope_head_dim={latent.qk_rope_head_dim} dims; leave head_dim out"
            )
        names = ("qk_norm", "attention_sinks", "value_norm", "keys_as_values", "shared_kv", "output_gate")
        if refused := [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name)]:
            raise ValueError(f"{' and '.join(refused)}: options of ordinary attention; leave them out with latent=...")

    @property
    def context_layout(self) -> Layout:
        """The layout of the tokens over a context-parallel group; see `split_sequence`."""
        return layout_of(self.context_parallel)

    @property
    def attention_options(self) -> AttentionOptions:
        """The options of `packed_attention` that the config states."""
        assert self.head_dim is not None  # set by `__post_init__`
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        softcap, backend = self.attention_softcap, self.attention_backend
        return {"window": self.window, "scale": scale, "softcap": softcap, "backend": backend}
