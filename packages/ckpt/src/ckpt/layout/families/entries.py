"""The table of known families."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckpt.layout.families.deepseek_v3 import DEEPSEEK_ROWS, LATENT_FLAGS, ROUTED_AND_SHARED, SHARED_EXPERTS
from ckpt.layout.families.gated_delta_net import OLMO_HYBRID
from ckpt.layout.families.gemma4 import GEMMA4
from ckpt.layout.families.kimi_linear import KIMI_LINEAR
from ckpt.layout.families.mamba2 import GRANITE_EXPERTS, GRANITE_HYBRID, NEMOTRON_H
from ckpt.layout.families.qwen3_next import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from ckpt.layout.families.rows import (
    ATTENTION,
    ENDS,
    EXPERTS,
    GATED_MLP,
    NORMS,
    PREDICTING,
    QWEN2_SHARED_EXPERT,
    experts,
    norms,
)
from ckpt.layout.families.table import ROTARY_BUFFERS, Family, Flags, Row
from ckpt.layout.families.towers import GLM4V, KIMI_K25, QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_VL

# Grouped-query attention and a gated MLP, as in Llama.
_DENSE = (*ENDS, *NORMS, *ATTENTION, *GATED_MLP)
_QKV_BIAS: Flags = {"qkv_bias": True}
_CONFIGURED_BIAS: Flags = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_CONFIGURED_BIASES: Flags = {**_CONFIGURED_BIAS, "mlp_bias": "mlp_bias"}
_QK_NORM: Flags = {**_CONFIGURED_BIAS, "qk_norm": True}

# The norms stand behind attention and the MLP. Every rank holds the norms over all heads whole, and uses the part of
# its own heads.
_BEHIND_ATTENTION, _BEHIND_MLP = "self_attn_bda.post_layernorm.weight", "mlp_bda.post_layernorm.weight"
_OLMO2_NORMS = (
    Row({"post_attention_layernorm.weight": "H"}, _BEHIND_ATTENTION),
    Row({"post_feedforward_layernorm.weight": "H"}, _BEHIND_MLP),
    Row({"self_attn.q_norm.weight": "Q"}, "self_attention.q_layernorm.weight"),
    Row({"self_attn.k_norm.weight": "KV"}, "self_attention.k_layernorm.weight"),
)

# Gemma has norms before and behind attention and MLP.
_GEMMA_NORMS = (
    *norms("input_layernorm", "pre_feedforward_layernorm", parallel="pre_feedforward_layernorm.weight"),
    *_OLMO2_NORMS[:2],
)
_GEMMA = (*ENDS, *_GEMMA_NORMS, *ATTENTION, *GATED_MLP)

# The MLP has no gate, and its xIELU activation has parameters. transformers stores beta and eps as buffers.
_APERTUS_MLP = (
    Row({"mlp.up_proj.weight": "I/tp H"}, "mlp.linear_fc1.weight"),
    Row({"mlp.down_proj.weight": "H I/tp"}, "mlp.linear_fc2.weight"),
    Row({"mlp.act_fn.alpha_p": "ONE"}, "mlp.activation_func.alpha_p"),
    Row({"mlp.act_fn.alpha_n": "ONE"}, "mlp.activation_func.alpha_n"),
    Row({"mlp.act_fn.beta": ""}, "mlp.activation_func.beta", optional=True),
    Row({"mlp.act_fn.eps": ""}, "mlp.activation_func.eps", optional=True),
)

# Files of some families hold the gate and up projections fused.
_FUSED_MLP = (
    Row({"mlp.gate_up_proj.weight": "I/tp+I/tp H"}, "mlp.linear_fc1.weight"),
    Row({"mlp.down_proj.weight": "H I/tp"}, "mlp.linear_fc2.weight"),
)

# GLM-4 has two more norms, behind attention and the MLP.
_GLM4 = (
    *ENDS,
    *norms("input_layernorm", "post_attention_layernorm", parallel="pre_feedforward_layernorm.weight"),
    Row({"post_self_attn_layernorm.weight": "H"}, _BEHIND_ATTENTION, "post_attention_layernorm.weight"),
    Row({"post_mlp_layernorm.weight": "H"}, _BEHIND_MLP, "post_feedforward_layernorm.weight"),
    *ATTENTION,
    *_FUSED_MLP,
)

# Files of gpt-oss stack the experts, with inputs before outputs and alternating columns of gate and up.
_GPT_OSS_EXPERTS = {
    **{"gate_up_proj": "H I2/etp", "gate_up_proj_bias": "I2/etp"},
    **{"down_proj": "I/etp H", "down_proj_bias": "H"},
}
_GPT_OSS_LAYERS = (
    Row({"self_attn.sinks": "N/tp"}, "self_attention.core_attention.softmax_offset"),
    Row({"mlp.router.weight": "E H"}, "mlp.router.weight", "mlp.gate.weight", layers="moe"),
    Row({"mlp.router.bias": "E"}, "mlp.router.bias", "mlp.gate.bias", layers="moe"),
    *(
        Row({f"mlp.experts.{name}": f"E/ep {shape}"}, f"mlp.experts.{name}", layers="moe")
        for name, shape in _GPT_OSS_EXPERTS.items()
    ),
)

# Files of Qwen3-VL-MoE stack the experts, with inputs before outputs; transformers saves them with outputs first.
_QWEN3_VL_EXPERTS = (
    Row({"mlp.gate.weight": "E H"}, "mlp.router.weight", "mlp.gate.weight", layers="moe"),
    *(
        Row({name: f"E/ep {shape}"}, name, layers="moe", transposable=True)
        for name, shape in (("mlp.experts.gate_up_proj", "H M/etp+M/etp"), ("mlp.experts.down_proj", "M/etp H"))
    ),
)

_MINIMAX_BIAS = Row(
    {"block_sparse_moe.e_score_correction_bias": "E"},
    "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias",
    layers="moe",
    keep_dtype=True,
)

# The router is fp32 beside weights of any dtype.
_ERNIE_EXPERTS = (
    *(dataclasses.replace(row, keep_dtype="mlp.gate.weight" in row.sources) for row in EXPERTS),
    *SHARED_EXPERTS,
    Row(
        {"mlp.moe_statics.e_score_correction_bias": "L E"},
        parallel="mlp.gate.e_score_correction_bias",
        layers="moe",
        flat=1,
        keep_dtype=True,
    ),
)

# Files of Phi-3 fuse queries with keys and values, and gate with up.
_PHI3_LAYERS = (
    Row(
        {"self_attn.qkv_proj.weight": "Q/tp+KV/tp+KV/tp H"},
        "self_attention.linear_qkv.weight",
        megatron_order="groups",
    ),
    Row({"self_attn.o_proj.weight": "H Q/tp"}, "self_attention.linear_proj.weight"),
    *_FUSED_MLP,
)

# transformers saves the language model and the vision tower of newer families under "model."; older files do not.
_NESTED: Mapping[str, Any] = {
    "prefixes": ("model.language_model.", "model."),
    "carried": (("model.visual.", "visual."),),
}
_QWEN2_VISION = Family(
    "qwen2_vl",
    "Qwen2VL",
    _DENSE,
    _QKV_BIAS,
    prefixes=("model.", "model.language_model."),
    carried=(("visual.", "model.visual."),),
    tower=QWEN2_VL,
)
_GLM4_ENTRY = Family("glm4", "Glm4", _GLM4, {"qkv_bias": ("attention_bias", True)})
_GLM4_MOE = Family(
    "glm4_moe",
    "Glm4Moe",
    (*_DENSE, *ROUTED_AND_SHARED),
    {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm", "correction_bias": True},
    predicting=PREDICTING,
)
_DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3", DEEPSEEK_ROWS, LATENT_FLAGS, predicting=PREDICTING)

_ENTRIES = (
    Family(
        "apertus",
        "Apertus",
        (*ENDS, *norms("attention_layernorm", "feedforward_layernorm"), *ATTENTION, *_APERTUS_MLP),
        _QK_NORM,
    ),
    _DEEPSEEK_V3,
    _GLM4_ENTRY,
    _GLM4_MOE,
    dataclasses.replace(_DEEPSEEK_V3, name="glm4_moe_lite", class_prefix="Glm4MoeLite"),
    dataclasses.replace(_GLM4_ENTRY, name="glm4v", class_prefix="Glm4v", tower=GLM4V, **_NESTED),
    Family(
        "glm4v_moe",
        "Glm4vMoe",
        _GLM4_MOE.rows,
        {"qkv_bias": ("attention_bias", True), "correction_bias": True},
        tower=GLM4V,
        **_NESTED,
    ),
    Family(
        "gpt_oss",
        "GptOss",
        (*ENDS, *NORMS, *ATTENTION, *_GPT_OSS_LAYERS),
        {"qkv_bias": ("attention_bias", True), "o_bias": ("attention_bias", True)},
    ),
    Family("deepseek_v2", "DeepseekV2", DEEPSEEK_ROWS, {**LATENT_FLAGS, "correction_bias": False}),
    Family("ernie4_5", "Ernie4_5", _DENSE, dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), "use_bias"), tied=True),
    Family(
        "minimax_m2",
        "MiniMaxM2",
        (
            *ENDS,
            *NORMS,
            *_OLMO2_NORMS[2:],
            *ATTENTION,
            *experts("block_sparse_moe", "w1", "w3", "w2", width="I"),
            _MINIMAX_BIAS,
        ),
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        (*_DENSE, *_ERNIE_EXPERTS),
        tied=True,
        # transformers has no class for its layers of multi-token prediction.
        ignored=(ROTARY_BUFFERS, r"^model\.mtp_"),
    ),
    Family(
        "cohere2",
        "Cohere2",
        (*ENDS, Row({"input_layernorm.weight": "H"}), *ATTENTION, *GATED_MLP),
        _CONFIGURED_BIAS,
        tied=True,
    ),
    # The canonical names are the names in the published files; transformers saves some tensors under other names.
    Family(
        "kimi_k25",
        "Kimi_K25",
        DEEPSEEK_ROWS,
        LATENT_FLAGS,
        tied=True,
        ties="outer",
        prefixes=("language_model.model.", "model.language_model."),
        layers=("language_model.model.blocks.",),
        ends={"lm_head.": ("language_model.lm_head.", "lm_head.")},
        carried=(
            ("vision_tower.patch_embed.", "vision_tower.encoder.patch_embed."),
            ("vision_tower.encoder.",),
            ("mm_projector.", "model.mm_projector."),
        ),
        tower=KIMI_K25,
    ),
    Family("ministral3", "Ministral3", _DENSE),
    # The text part is a Ministral 3 or a Mistral.
    Family(
        "mistral3",
        "Mistral3",
        _DENSE,
        prefixes=("language_model.model.", "model.language_model."),
        ties="first",
        ends={"lm_head.": ("language_model.lm_head.", "lm_head.")},
        carried=tuple((f"{module}.", f"model.{module}.") for module in ("vision_tower", "multi_modal_projector")),
    ),
    Family("phi3", "Phi3", (*ENDS, *NORMS, *_PHI3_LAYERS)),
    Family("gemma2", "Gemma2", _GEMMA, _CONFIGURED_BIAS, tied=True),
    Family("gemma3_text", "Gemma3", _GEMMA, _QK_NORM, tied=True),
    GEMMA4,
    dataclasses.replace(
        GEMMA4,
        name="gemma4",
        ties="outer",
        prefixes=("model.language_model.",),
        carried=tuple(
            (f"model.{module}.",) for module in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    Family("granite", "Granite", _DENSE, _CONFIGURED_BIASES),
    Family("granitemoe", "GraniteMoe", (*ENDS, *NORMS, *ATTENTION, *GRANITE_EXPERTS), _CONFIGURED_BIAS),
    GRANITE_HYBRID,
    Family("olmo3", "Olmo3", (*ENDS, *_OLMO2_NORMS, *ATTENTION, *GATED_MLP), _CONFIGURED_BIAS),
    Family("smollm3", "SmolLM3", _DENSE, _CONFIGURED_BIASES, tied=True),
    Family("exaone4", "Exaone4", (*ENDS, *_OLMO2_NORMS[:2], *ATTENTION, *GATED_MLP), {"qk_norm": True}),
    Family("llama", "Llama", _DENSE, _CONFIGURED_BIASES),
    Family("mistral", "Mistral", _DENSE),
    Family(
        "mixtral",
        "Mixtral",
        (*ENDS, *NORMS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2", width="I")),
    ),
    Family("olmo2", "Olmo2", (*ENDS, *_OLMO2_NORMS, *ATTENTION, *GATED_MLP), _CONFIGURED_BIAS),
    Family(
        "seed_oss",
        "SeedOss",
        _DENSE,
        {"qkv_bias": ("attention_bias", True), "o_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    ),
    Family("qwen2_moe", "Qwen2Moe", (*_DENSE, *EXPERTS, *QWEN2_SHARED_EXPERT), {"qkv_bias": ("qkv_bias", True)}),
    Family("qwen2", "Qwen2", _DENSE, _QKV_BIAS),
    _QWEN2_VISION,
    dataclasses.replace(_QWEN2_VISION, name="qwen2_5_vl", class_prefix="Qwen2_5_VL", tower=QWEN2_5_VL),
    Family("qwen3", "Qwen3", _DENSE, _QK_NORM),
    Family("qwen3_moe", "Qwen3Moe", (*_DENSE, *EXPERTS), _QK_NORM),
    Family("qwen3_vl", "Qwen3VL", _DENSE, _QK_NORM, ties="outer", tower=QWEN3_VL, **_NESTED),
    Family(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        (*_DENSE, *_QWEN3_VL_EXPERTS),
        _QK_NORM,
        ties="outer",
        tower=QWEN3_VL,
        **_NESTED,
    ),
    OLMO_HYBRID,
    NEMOTRON_H,
    KIMI_LINEAR,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    dataclasses.replace(QWEN3_5_TEXT, name="qwen3_5", ties="outer", tower=QWEN3_5, **_NESTED),
    dataclasses.replace(QWEN3_5_MOE_TEXT, name="qwen3_5_moe", ties="outer", tower=QWEN3_5, **_NESTED),
)
FAMILIES = {family.name: family for family in _ENTRIES}
