"""`DecoderLayer`: the layer of every decoder, described by a `DecoderConfig`.

Shape legend: T tokens of the whole pack, T' this rank's tokens under sequence parallelism (else T), H hidden,
D rotary dims, S segments.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.attention.cache import CacheShape, LayerCache
from parallel_layers.attention.config import AttentionConfig
from parallel_layers.attention.latent import ParallelLatentAttention
from parallel_layers.attention.layer import ParallelAttention
from parallel_layers.attention.shared_keys import SharedKeys
from parallel_layers.attention.shared_kv import SharedKeysValues
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.layers import ReplicatedLinear
from parallel_layers.linear_attention.config import GatedDeltaNetConfig, KimiDeltaConfig, Mamba2Config, StateShape
from parallel_layers.linear_attention.gated_delta_net import GatedDeltaNet
from parallel_layers.linear_attention.kimi_delta_attention import KimiDeltaAttention
from parallel_layers.linear_attention.mamba2 import Mamba2
from parallel_layers.mlp.layer import GatedActivation, ParallelMLP, activation_function
from parallel_layers.moe.config import MoEConfig
from parallel_layers.moe.context import RoutingContext
from parallel_layers.moe.layer import MoE
from parallel_layers.norm.layer_norm import LayerNorm
from parallel_layers.norm.rms import RMSNorm

NormPlacement = Literal["pre", "post", "sandwich", "parallel"]
Normalization = Literal["rms", "layer"]
Mixer = Literal["attention", "mlp"]


class _Norms(NamedTuple):
    """Names of the norms before and after attention and before and after the MLP; None: no norm."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


# Hugging Face's names of modules. `post_attention_layernorm` norms the input of the MLP for "pre", and
# the output of attention before the residual addition for "post" and "sandwich".
NORM_PLACEMENTS: dict[str, _Norms] = {
    "pre": _Norms("input_layernorm", None, "post_attention_layernorm", None),
    "post": _Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": _Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "parallel": _Norms("input_layernorm", None, None, None),
}
# Of a layer with one mixer.
_NORMS_OF_MIXERS = {"attention": _Norms("norm", None, None, None), "mlp": _Norms(None, None, "norm", None)}

LINEAR_ATTENTION: dict[type, type[GatedDeltaNet | KimiDeltaAttention | Mamba2]] = {
    GatedDeltaNetConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDeltaAttention,
    Mamba2Config: Mamba2,
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(AttentionConfig):
    """The sizes and variants of a decoder layer. The defaults are Llama's.

    Attributes:
        intermediate_size: Intermediate size of the MLP.
        activation: See `ParallelMLP`.
        gated_mlp: True: act(gate) · up (SwiGLU, GeGLU). False: act(up).
        mlp_bias: The MLP's projections have biases.
        linear_attention: Linear attention in place of attention, with its own sizes; None: attention. The fields of
            `AttentionConfig` then describe the layer's norms alone.
        moe: Mixture of experts in place of the MLP, with its own sizes and activation; None: an MLP.
        normalization: Norms of hidden states: "rms": RMSNorm. "layer": LayerNorm without bias (Cohere).
        norm_eps: Epsilon of every norm.
        norm_unit_offset: Norm weights are stored as differences from one (Gemma).
        mixer: The layer's only half, "attention" (or linear attention) or "mlp" (or a mixture of experts), behind the
            norm `norm` (Nemotron-H); None: attention, then an MLP.
        norm_placement: "pre": before attention and MLP (Llama). "post": after each, before the residual addition
            (OLMo-2). "sandwich": both (Gemma 2). "parallel": attention and MLP read one norm's output (Cohere).
        residual_multiplier: Factor of the outputs of attention and MLP before the residual addition (Granite).
        per_layer_size: The size P of a further input of the layer, which a gated projection adds behind the MLP
            (Gemma 4 E2B and E4B); 0: none.
        output_scale: The layer's output is multiplied by the buffer `layer_scalar` of the checkpoint (Gemma 4).
    """

    intermediate_size: int
    activation: GatedActivation = "silu"
    gated_mlp: bool = True
    mlp_bias: bool = False
    linear_attention: GatedDeltaNetConfig | KimiDeltaConfig | Mamba2Config | None = None
    moe: MoEConfig | None = None
    mixer: Mixer | None = None
    normalization: Normalization = "rms"
    norm_placement: NormPlacement = "pre"
    residual_multiplier: float = 1.0
    output_scale: bool = False
    per_layer_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_placement not in NORM_PLACEMENTS:
            raise ValueError(
                f"norm_placement={self.norm_placement!r} is unknown; use one of {', '.join(NORM_PLACEMENTS)}"
            )
        if self.normalization not in get_args(Normalization):
            raise ValueError(f"normalization={self.normalization!r} is unknown; use 'rms' or 'layer'")
        if self.mixer not in (None, *get_args(Mixer)):
            raise ValueError(f"mixer={self.mixer!r} is unknown; use 'attention', 'mlp' or None")
        if self.normalization == "layer" and self.norm_unit_offset:
            raise ValueError("norm_unit_offset=True is of RMSNorm; leave it out with normalization='layer'")

    def build_norm(
        self,
        placement: Placement = UNDIVIDED,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> RMSNorm | LayerNorm:
        """Return a new norm of hidden states, for a layer or behind the last layer."""
        how: dict[str, Any] = {"eps": self.norm_eps, "group": placement.group, "dtype": dtype, "device": device}
        how["sequence_parallel"] = placement.sequence_parallel
        if self.normalization == "layer":
            return LayerNorm(self.hidden_size, **how)
        return RMSNorm(self.hidden_size, unit_offset=self.norm_unit_offset, **how)


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norms and a residual connection.

        h = x + norm_out(attention(norm_in(x)))
        y = h + norm_out(mlp(norm_in(h)))            (norms by `DecoderConfig.norm_placement`)
        y = x + attention(norm(x)) + mlp(norm(x))    ("parallel")
        y = x + mixer(norm(x))                       (`DecoderConfig.mixer`)

    times `residual_multiplier` before the additions; then, with `per_layer_size` and `output_scale`,

        y = y + norm(projection(act(gate(y)) · per_layer)),    y = y · layer_scalar

    Submodules: `self_attn` (a `ParallelAttention` or `ParallelLatentAttention`) or `linear_attn` (a `GatedDeltaNet`,
    `KimiDeltaAttention` or `Mamba2`), `mlp` (a `ParallelMLP` or `MoE`) and norms with Hugging Face's names.
    Communication: by the submodules; sequence parallelism adds an all-reduce of each norm weight's gradient in the
    backward.

    Args:
        config: The description of the layer.
        placement: The groups of the layer and its tokens. Under sequence parallelism hidden states are `[T/tp, H]`.
        execution: The execution of the linear layers.
        context_group: Context-parallel group; None: this rank has all tokens.
        layer_number: The layer's number in the model, the key in a `RoutingContext`.
        expert_group, expert_tensor_parallel: See `MoE`.
        dtype, device: Dtype and device of the parameters.
    """

    layer_scalar: Tensor | None

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
        self.config = config
        self.norms = _NORMS_OF_MIXERS[config.mixer] if config.mixer else NORM_PLACEMENTS[config.norm_placement]
        how: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        for name in filter(None, self.norms):
            self.add_module(name, config.build_norm(placement, dtype=dtype, device=device))
        if config.per_layer_size:
            self.per_layer_input_gate = ReplicatedLinear(config.hidden_size, config.per_layer_size, **how)
            self.per_layer_projection = ReplicatedLinear(config.per_layer_size, config.hidden_size, **how)
            self.post_per_layer_input_norm = config.build_norm(placement, dtype=dtype, device=device)
            self.per_layer_activation = activation_function(config.activation, gated=False)
        scale = torch.empty(1, dtype=dtype, device=device) if config.output_scale else None
        self.register_buffer("layer_scalar", scale)
        self.reset_parameters()
        attends, has_mlp = config.mixer != "mlp", config.mixer != "attention"
        if attends and config.linear_attention is not None:
            how_linear = {**how, "context_group": context_group, "context_parallel": config.context_parallel}
            kind: Any = LINEAR_ATTENTION[type(config.linear_attention)]
            self.linear_attn = kind(config.hidden_size, config.linear_attention, **how_linear)
        elif attends:
            attention = ParallelAttention if config.latent is None else ParallelLatentAttention
            self.self_attn = attention(config, context_group=context_group, **how)
        self.mlp: ParallelMLP | MoE
        if has_mlp and config.moe is None:
            self.mlp = ParallelMLP(
                config.hidden_size, config.intermediate_size,
                activation=config.activation, gated=config.gated_mlp, bias=config.mlp_bias, **how,
            )  # fmt: skip
        elif config.moe is not None and has_mlp:
            self.mlp = MoE(
                config.hidden_size, config.moe,
                layer_number=layer_number, expert_group=expert_group, expert_tensor_parallel=expert_tensor_parallel,
                **how,
            )  # fmt: skip

    def reset_parameters(self) -> None:
        """Set the factor of the output to 1; the submodules have their own `reset_parameters`."""
        if self.layer_scalar is not None:
            self.layer_scalar.fill_(1)

    @property
    def cache_shape(self) -> CacheShape | StateShape:
        """The entry of this layer in a `PagedKVCache`; a layer without attention has an empty one."""
        if self.config.mixer == "mlp":
            return CacheShape(0, 0, 0)
        linear = self.config.linear_attention
        return self.self_attn.cache_shape if linear is None else linear.state_shape(self.linear_attn.placement.tp)

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        """Apply the norm of an output, and the factor of the residual addition."""
        x = x if name is None else getattr(self, name)(x)
        return x if self.config.residual_multiplier == 1 else x * self.config.residual_multiplier

    def add_mlp(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Add the output x of the MLP to the residual stream."""
        return hidden + self._norm(self.norms.mlp_out, x)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, ...] | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: LayerCache | None = None,
        routing: RoutingContext | None = None,
        shared_keys: SharedKeys | None = None,
        stored_kv: SharedKeysValues | None = None,
        per_layer: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer: `[T', H]` -> `[T', H]`.

        Args:
            hidden: `[T', H]`.
            rotary: `RotaryEmbedding.tables` for all T tokens; None: no rotation.
            cu_seqlens: `[S+1]` int32 boundaries among all T tokens.
            max_seqlen: Upper bound of a segment's length.
            cache: `PagedKVCache.layer(i)` for inference, of the shape `cache_shape`.
            routing: Padding, replay and reports of a mixture of experts; see `MoE.forward`.
            shared_keys: The tokens to which each segment attends (`PackedSequence.shared_keys`); None: its own.
            stored_kv: See `ParallelAttention.forward`.
            per_layer: `[T', P]`, this layer's further input.

        Raises:
            ValueError: `per_layer` is missing; or a layer with linear attention gets shared keys.
        """
        x, attended = hidden, None
        if self.norms.attention_in is not None:
            x, hidden = getattr(self, self.norms.attention_in).add_and_norm(hidden)
        if self.config.mixer != "mlp":
            attended = self._attend(x, rotary, cu_seqlens, max_seqlen, cache, shared_keys, stored_kv)
        if self.norms.mlp_in is not None:
            arguments = (hidden,) if attended is None else (attended, hidden)
            x, hidden = getattr(self, self.norms.mlp_in).add_and_norm(*arguments)
        elif attended is not None:
            hidden = hidden + attended
            x = x if self.config.norm_placement == "parallel" else hidden
        if self.config.mixer != "attention":
            if isinstance(self.mlp, MoE):
                x = self.mlp(x, routing, hidden if self.mlp.config.branch_norms else None)
            else:
                x = self.mlp(x)
            hidden = self.add_mlp(hidden, x)
        if self.config.per_layer_size:
            if per_layer is None:
                raise ValueError(
                    f"per_layer_size={self.config.per_layer_size}: pass per_layer, this layer's further input"
                )
            x = self.per_layer_activation(self.per_layer_input_gate(hidden)) * per_layer
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(x))
        return hidden if self.layer_scalar is None else hidden * self.layer_scalar

    def _attend(
        self,
        x: Tensor,
        rotary: tuple[Tensor, ...] | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: LayerCache | None,
        shared_keys: SharedKeys | None,
        stored_kv: SharedKeysValues | None,
    ) -> Tensor:
        """Return what attention or linear attention adds to the residual stream, `[T', H]`; see `forward`."""
        if self.config.linear_attention is None:
            further = (stored_kv,) if self.config.shared_kv is not None else ()
            attended = self.self_attn(x, rotary, cu_seqlens, max_seqlen, cache, shared_keys, *further)
        elif shared_keys is None:
            attended = self.linear_attn(x, cu_seqlens, cache)
        else:
            raise ValueError("linear attention does not go with shared keys: give whole sequences")
        return self._norm(self.norms.attention_out, attended)
