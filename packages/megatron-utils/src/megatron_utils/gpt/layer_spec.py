"""Layer specs: the modules of a layer, from torch only or from Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any, Literal

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_utils.gpt.config import is_stacked
from megatron_utils.gpt.experts import BiasedRouter, StackedExperts
from megatron_utils.gpt.latent_attention import LATENT_NORM_EPS, LatentAttention
from megatron_utils.gpt.modules import PackedCoreAttention
from megatron_utils.gpt.norms import AllHeadsNorm, Norm, ResidualAdd
from parallel_layers import DecoderConfig, ModelConfig
from parallel_layers.model import NORM_PLACEMENTS

LayerSpec = Literal["local", "transformer_engine"]


def block_spec(
    config: TransformerConfig,
    model: ModelConfig,
    layer_spec: LayerSpec,
    groups: ProcessGroupCollection,
    *,
    stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of one chunk's layers, dense and mixture layers in their places; raise as `one_layer`."""
    if not gpt_layer_specs.HAVE_TE:
        # Megatron-Core 0.16 leaves the one undefined where Transformer Engine is missing, and then tests it against
        # None; in the other module it takes its own stand-ins for Transformer Engine, and then tests against a type.
        moe_utils.te_general_gemm = None
        multi_latent_attention.HAVE_TE = False
    is_moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: one_layer(config, model, layer_spec, groups, moe=bool(kind)) for kind in set(is_moe)}
    pp_rank = groups.pp.rank()
    if config.pipeline_model_parallel_layout is not None:
        layers = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, stage, pp_rank)
    else:
        offset = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=pp_rank)
        layers = range(offset, offset + get_num_layers_to_build(config, vp_stage=stage, pp_rank=pp_rank))
    return TransformerBlockSubmodules(layer_specs=[specs[is_moe[i]] for i in layers], layer_norm=Norm)


def one_layer(
    config: TransformerConfig, model: ModelConfig, layer_spec: LayerSpec, groups: ProcessGroupCollection, *, moe: bool
) -> ModuleSpec:
    """Return the spec of a dense layer or of a mixture layer.

    Raises:
        ValueError: The spec is unknown or cannot express the model.
        ImportError: Transformer Engine is asked for and not installed.
    """
    decoder = model.decoder
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
    attention.submodules.core_attention = ModuleSpec(module=PackedCoreAttention, params={"model": model})
    if latent:
        attention.module = LatentAttention
        attention.params = attention.params | {"fused_norms": layer_spec == "transformer_engine"}
    if decoder.qk_norm == "full":
        for name, heads in (("q_layernorm", decoder.num_heads), ("k_layernorm", decoder.num_kv_heads)):
            params = {"num_heads": heads, "group": groups.tp}
            setattr(attention.submodules, name, ModuleSpec(module=AllHeadsNorm, params=params))
    norms = NORM_PLACEMENTS[decoder.norm_placement]
    if norms.mlp_in is None:
        _without_norms(spec, layer_spec)
    if norms.mlp_out is not None or decoder.residual_multiplier != 1:
        params = {"config": config, "normed": norms.mlp_out is not None, "multiplier": decoder.residual_multiplier}
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = ModuleSpec(module=ResidualAdd, params=params)
    if decoder.output_bias:
        attention.submodules.linear_proj = _biased(attention.submodules.linear_proj)
    if decoder.mlp_bias and not moe:
        mlp = submodules_of(spec.submodules.mlp)
        mlp.linear_fc1, mlp.linear_fc2 = _biased(mlp.linear_fc1), _biased(mlp.linear_fc2)
    mixture = next(filter(None, model.moe), None)
    if moe and mixture is not None and mixture.router_bias:
        submodules_of(spec.submodules.mlp).router = BiasedRouter
    if moe and mixture is not None and is_stacked(mixture):
        submodules_of(spec.submodules.mlp).experts = ModuleSpec(module=StackedExperts, params={"moe": mixture})
    return spec


def submodules_of(spec: Any) -> Any:
    """Return the submodules of a layer's MLP, which versions of Megatron-Core give as a spec or as a partial."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _without_norms(spec: ModuleSpec, layer_spec: LayerSpec) -> None:
    """Take out the norms before attention and the MLP, which Transformer Engine fuses with the projection behind."""
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if layer_spec == "transformer_engine":
        linear = gpt_layer_specs.TESpecProvider().column_parallel_linear()
        layer.self_attention.submodules.linear_qkv = linear
        mlp = submodules_of(layer.mlp)
        if hasattr(mlp, "linear_fc1"):
            mlp.linear_fc1 = linear


def _local(decoder: DecoderConfig, options: dict[str, Any]) -> ModuleSpec:
    """Return a spec of Megatron's own linears, with norms that support sequence parallelism."""
    if options["multi_latent_attention"]:
        options = options | {"qk_layernorm": False}  # `LatentAttention` has the norms of latents itself
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    attention = spec.submodules.self_attention.submodules
    for holder, name, norm in (
        (spec.submodules, "input_layernorm", Norm),
        (spec.submodules, "pre_mlp_layernorm", Norm),
        (attention, "q_layernorm", Norm),
        (attention, "k_layernorm", Norm),
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

    class BiasedLinear(linear):
        """The class with `bias=True`, independent of Megatron's config."""

        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return BiasedLinear
