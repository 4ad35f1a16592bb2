"""Layer specs: the modules of a layer, from torch only or from Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any, Literal

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_utils.gpt.latent_attention import LATENT_NORM_EPS, LatentAttention, LatentNorm
from megatron_utils.gpt.modules import Norm, PackedCoreAttention
from parallel_layers import DecoderConfig

LayerSpec = Literal["local", "transformer_engine"]


def block_spec(
    config: TransformerConfig, decoder: DecoderConfig, layer_spec: LayerSpec, *, stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the specs of one chunk's layers, dense and mixture layers in their places; raise as `one_layer`."""
    if not gpt_layer_specs.HAVE_TE:
        # Megatron-Core 0.16 leaves the one undefined where Transformer Engine is missing, and then tests it against
        # None; in the other module it takes its own stand-ins for Transformer Engine, and then tests against a type.
        moe_utils.te_general_gemm = None
        multi_latent_attention.HAVE_TE = False
    is_moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: one_layer(config, decoder, layer_spec, moe=bool(kind)) for kind in set(is_moe)}
    if config.pipeline_model_parallel_layout is not None:
        layers = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=stage)
    else:
        offset = get_transformer_layer_offset(config, vp_stage=stage)
        layers = range(offset, offset + get_num_layers_to_build(config, vp_stage=stage))
    return TransformerBlockSubmodules(layer_specs=[specs[is_moe[i]] for i in layers], layer_norm=Norm)


def one_layer(config: TransformerConfig, decoder: DecoderConfig, layer_spec: LayerSpec, *, moe: bool) -> ModuleSpec:
    """Return the spec of a dense layer or of a mixture layer.

    Raises:
        ValueError: The spec is unknown or cannot express the model.
        ImportError: Transformer Engine is asked for and not installed.
    """
    latent = decoder.latent is not None
    options = {
        "num_experts": config.num_moe_experts if moe else None,
        "qk_layernorm": latent or config.qk_layernorm,
        "multi_latent_attention": latent,
    }
    if layer_spec not in _SPECS:
        raise ValueError(f"layer_spec={layer_spec!r} is unknown; use one of {', '.join(_SPECS)}")
    spec = _SPECS[layer_spec](decoder, options)
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = ModuleSpec(
        module=PackedCoreAttention, params={"rotates": not latent, "scale": decoder.attention_scale}
    )
    if latent:
        attention.module = LatentAttention
    if decoder.output_bias:
        attention.submodules.linear_proj = _biased(attention.submodules.linear_proj)
    if decoder.mlp_bias and not moe:
        mlp = spec.submodules.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = _biased(mlp.linear_fc1), _biased(mlp.linear_fc2)
    return spec


def _local(decoder: DecoderConfig, options: dict[str, Any]) -> ModuleSpec:
    """Return a spec of Megatron's own linears, with norms that support sequence parallelism."""
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    attention = spec.submodules.self_attention.submodules
    inside = LatentNorm if options["multi_latent_attention"] else Norm
    for holder, name, norm in (
        (spec.submodules, "input_layernorm", Norm),
        (spec.submodules, "pre_mlp_layernorm", Norm),
        (attention, "q_layernorm", inside),
        (attention, "k_layernorm", inside),
        (attention, "kv_layernorm", inside),
    ):
        if getattr(holder, name, IdentityOp) is not IdentityOp:
            setattr(holder, name, norm)
    return spec


def _transformer_engine(decoder: DecoderConfig, options: dict[str, Any]) -> ModuleSpec:
    """Return a spec of Transformer Engine's linears with fused norms, and its grouped experts."""
    if not gpt_layer_specs.HAVE_TE:
        raise ImportError("layer_spec='transformer_engine' needs transformer-engine; install it or use 'local'")
    if options["multi_latent_attention"] and decoder.norm_eps != LATENT_NORM_EPS:
        raise ValueError(
            f"rms_norm_eps={decoder.norm_eps}: Transformer Engine's fused norms use it for the latents too, whose "
            f"norms have {LATENT_NORM_EPS}; use layer_spec='local'"
        )
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **options)


_SPECS = {"local": _local, "transformer_engine": _transformer_engine}


@functools.cache
def _biased(linear: type) -> type:
    """Return a linear class with a bias; Megatron has a single switch for the biases of attention and MLP."""

    class Biased(linear):
        """The class with `bias=True`, independent of Megatron's config."""

        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return Biased
