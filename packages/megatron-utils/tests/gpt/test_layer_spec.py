"""Which module stands where in a layer. (What the layers compute: `test_model.py`, and on GPUs `test_gpu.py`.)"""

from typing import Any

import pytest

from megatron_utils.testing import tiny_config
from parallel_layers import ModelConfig, ParallelDims

LLAMA, LATENT = tiny_config("llama"), tiny_config("deepseek_v3", n_group=1, topk_group=1)


def layers(hf: dict[str, Any], layer_spec: str) -> list[Any]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_utils.gpt import transformer_config
    from megatron_utils.gpt.layer_spec import one_layer

    config, model = transformer_config(hf, ParallelDims()), ModelConfig.from_hf(hf)
    return [one_layer(config, model, layer_spec, ProcessGroupCollection(tp=None), moe=moe) for moe in (False, True)]


def mlp_of(layer: Any) -> Any:
    from megatron_utils.gpt.layer_spec import submodules_of

    return submodules_of(layer.mlp)


def test_an_unknown_spec_and_a_missing_transformer_engine_are_named() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    with pytest.raises(ValueError, match="layer_spec='apex' is unknown; use one of local, transformer_engine"):
        layers(LLAMA, "apex")
    if gpt_layer_specs.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    with pytest.raises(ImportError, match="layer_spec='transformer_engine' needs transformer-engine"):
        layers(LLAMA, "transformer_engine")


def test_biases_are_where_the_family_has_them() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    plain, biased = (
        layers({**LLAMA, "mlp_bias": bias, "attention_bias": bias}, "local")[0].submodules for bias in (False, True)
    )
    for spec, own in ((plain, True), (biased, False)):
        assert (spec.self_attention.submodules.linear_proj is RowParallelLinear) is own
        assert (mlp_of(spec).linear_fc1 is ColumnParallelLinear) is own
        assert (mlp_of(spec).linear_fc2 is RowParallelLinear) is own


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's own spec of Transformer Engine, whose modules are never built here."""
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs

    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        if getattr(provider, name) is None:
            monkeypatch.setattr(provider, name, type(name, (), {}))
    # Without the package its version is unknown.
    monkeypatch.setattr(provider, "is_te_min_version", lambda version: True)
    return provider


def test_transformer_engine_brings_linears_norms_and_grouped_experts(transformer_engine: Any) -> None:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from megatron_utils.gpt.modules import PackedCoreAttention

    dense, mixture = (
        spec.submodules for spec in layers(tiny_config("qwen3_moe", mlp_only_layers=[0]), "transformer_engine")
    )
    for spec in (dense, mixture):
        attention = spec.self_attention.submodules
        assert attention.linear_qkv is transformer_engine.TELayerNormColumnParallelLinear
        assert attention.linear_proj is transformer_engine.TERowParallelLinear
        assert attention.q_layernorm is transformer_engine.TENorm
        assert attention.core_attention.module is PackedCoreAttention
        assert attention.core_attention.params["model"].family == "qwen3_moe"
    assert mlp_of(dense).linear_fc1 is transformer_engine.TELayerNormColumnParallelLinear
    experts = mlp_of(mixture).experts
    assert getattr(experts, "func", None) is TEGroupedMLP or experts.module is TEGroupedMLP
    # Megatron-Core 0.17 and later have a class of their own for a norm that also returns the residual.
    assert mixture.pre_mlp_layernorm.__name__ in ("TENorm", "_TENormWithResidual")


def test_transformer_engine_has_latent_attention_with_its_own_epsilon(transformer_engine: Any) -> None:
    from megatron_utils.gpt.latent_attention import LatentAttention

    spec = layers(LATENT, "transformer_engine")[0].submodules.self_attention
    assert spec.module is LatentAttention
    assert spec.submodules.linear_kv_down_proj is transformer_engine.TELinear
    assert spec.submodules.linear_kv_up_proj is transformer_engine.TELayerNormColumnParallelLinear
    with pytest.raises(ValueError, match="rms_norm_eps=1e-05: Transformer Engine's fused norms use it"):
        layers({**LATENT, "rms_norm_eps": 1e-5}, "transformer_engine")


def test_transformer_engine_has_no_fused_norm_where_the_norms_stand_behind(transformer_engine: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    from megatron_utils.gpt.norms import AllHeadsNorm, ResidualAdd

    spec = layers(tiny_config("olmo2"), "transformer_engine")[0].submodules
    attention = spec.self_attention.submodules
    assert attention.linear_qkv is mlp_of(spec).linear_fc1 is transformer_engine.TEColumnParallelLinear
    assert spec.input_layernorm is spec.pre_mlp_layernorm is IdentityOp
    assert attention.q_layernorm.module is attention.k_layernorm.module is AllHeadsNorm
    assert spec.self_attn_bda.module is spec.mlp_bda.module is ResidualAdd


@pytest.mark.parametrize("layer_spec", ["local", "transformer_engine"])
def test_experts_that_megatron_lacks_are_stacked(transformer_engine: Any, layer_spec: str) -> None:
    from megatron_utils.gpt.experts import BiasedRouter, StackedExperts

    mixture = mlp_of(layers(tiny_config("gpt_oss"), layer_spec)[1].submodules)
    assert mixture.router is BiasedRouter
    assert mixture.experts.module is StackedExperts
