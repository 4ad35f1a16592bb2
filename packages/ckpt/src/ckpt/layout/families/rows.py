"""Rows that families share: both ends of a model, grouped-query attention, the gated MLP and routed experts."""

from typing import Literal

from ckpt.layout.families.table import Row, Size

LAYER = "model.layers.{i}."
MEGATRON = "decoder.layers.{l}."
Layers = Literal["all", "dense", "moe"]

SIZES = {
    "V": Size("vocab_size", pad=True),
    "H": Size("hidden_size"),
    "Q": Size("num_attention_heads", unit="head_dim"),
    "KV": Size("num_key_value_heads", unit="head_dim", replicate=True),
    "D": Size("head_dim"),
    "I": Size("intermediate_size"),
    "L": Size("1"),  # one row of a value head
}

ENDS = (
    Row(
        {"model.embed_tokens.weight": "V/tp H"},
        parallel="model.embed_tokens.weight",
        megatron="embedding.word_embeddings.weight",
        where="first",
        tied="no",
    ),
    Row(
        {"model.embed_tokens.weight": "V/tp H"},
        parallel="model.embed_tokens.weight",
        megatron="embedding.word_embeddings.weight",
        where="first",
        tied="yes",
        aliases=("lm_head.weight",),
    ),
    Row(
        {"model.norm.weight": "H"},
        parallel="model.norm.weight",
        megatron="decoder.final_layernorm.weight",
        where="last",
    ),
    Row(
        {"lm_head.weight": "V/tp H"},
        parallel="lm_head.weight",
        megatron="output_layer.weight",
        where="last",
        roles=("causal_lm", "causal_lm_with_value"),
        tied="no",
    ),
    Row(
        {"model.embed_tokens.weight": "V/tp H"},
        parallel="lm_head.weight",
        megatron="output_layer.weight",
        where="last",
        roles=("causal_lm", "causal_lm_with_value"),
        tied="yes",
    ),
    Row(
        {"score.weight": "L H"},
        parallel="score.weight",
        megatron="output_layer.weight",
        where="last",
        roles=("value", "causal_lm_with_value"),
        optional=True,
        aliases=("v_head.summary.weight", "v_head.weight", "reward_head.weight", "lm_head.weight"),
    ),
    Row(
        {"score.bias": "L"},
        parallel="score.bias",
        megatron="output_layer.bias",
        where="last",
        roles=("value", "causal_lm_with_value"),
        optional=True,
        aliases=("v_head.summary.bias", "v_head.bias", "reward_head.bias"),
    ),
)


def norm(name: str, local: str, megatron: str = "", te: str | None = None, layers: Layers = "all") -> Row:
    """Return the row of a replicated norm weight `[H]`, by its names in files, on the native layers and on Megatron."""
    return Row(
        {f"{LAYER}{name}.weight": "H"},
        parallel=f"{LAYER}{local}.weight",
        megatron=megatron and f"{MEGATRON}{megatron}.weight",
        megatron_te=te and MEGATRON + te,
        layers=layers,
    )


def same(
    name: str,
    shape: str,
    megatron: str = "",
    te: str | None = None,
    when: str | None = None,
    layers: Layers = "all",
    keep_dtype: bool = False,
    optional: bool = False,
) -> Row:
    """Return the row of a tensor that has the same name in files and on the native layers."""
    return Row(
        {LAYER + name: shape},
        parallel=LAYER + name,
        megatron=megatron and MEGATRON + megatron,
        megatron_te=te and MEGATRON + te,
        when=when,
        layers=layers,
        keep_dtype=keep_dtype,
        optional=optional,
    )


def _qkv(kind: str, shape: str, when: str | None) -> Row:
    return Row(
        {
            f"{LAYER}self_attn.q_proj.{kind}": f"Q/tp{shape}",
            f"{LAYER}self_attn.k_proj.{kind}": f"KV/tp{shape}",
            f"{LAYER}self_attn.v_proj.{kind}": f"KV/tp{shape}",
        },
        parallel=f"{LAYER}self_attn.qkv_proj.{kind}",
        megatron=f"{MEGATRON}self_attention.linear_qkv.{kind}",
        megatron_order="groups",
        when=when,
    )


# Flags: qkv_bias, o_bias, qk_norm.
ATTENTION = (
    _qkv("weight", " H", None),
    _qkv("bias", "", "qkv_bias"),
    same("self_attn.q_norm.weight", "D", "self_attention.q_layernorm.weight", when="qk_norm"),
    same("self_attn.k_norm.weight", "D", "self_attention.k_layernorm.weight", when="qk_norm"),
    same("self_attn.o_proj.weight", "H Q/tp", "self_attention.linear_proj.weight"),
    same("self_attn.o_proj.bias", "H", "self_attention.linear_proj.bias", when="o_bias"),
)

_QKV_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FC1_NORM = "mlp.linear_fc1.layer_norm_weight"


def norms(first: str, second: str) -> tuple[Row, ...]:
    """Return the rows of the norms before attention and before the MLP, by their names in files.

    Transformer Engine holds the first norm in the fused projection behind it; in dense layers the second as well.
    """
    return (
        norm(first, "input_layernorm", "input_layernorm", te=_QKV_NORM),
        norm(second, "post_attention_layernorm", "pre_mlp_layernorm", te=_FC1_NORM, layers="dense"),
        norm(second, "post_attention_layernorm", "pre_mlp_layernorm", layers="moe"),
    )


NORMS = norms("input_layernorm", "post_attention_layernorm")


def gate_up(part: str, kind: str, shape: str, when: str | None = None, layers: Layers = "dense") -> Row:
    """Return the row of a gated MLP's two input projections, fused; `part` is the module, "mlp" or a module in it."""
    return Row(
        {f"{LAYER}{part}.gate_proj.{kind}": shape, f"{LAYER}{part}.up_proj.{kind}": shape},
        parallel=f"{LAYER}{part}.gate_up_proj.{kind}",
        megatron=f"{MEGATRON}{part}.linear_fc1.{kind}",
        when=when,
        layers=layers,
    )


# Flag: mlp_bias.
GATED_MLP = (
    gate_up("mlp", "weight", "I/tp H"),
    gate_up("mlp", "bias", "I/tp", when="mlp_bias"),
    same("mlp.down_proj.weight", "H I/tp", "mlp.linear_fc2.weight", layers="dense"),
    same("mlp.down_proj.bias", "H", "mlp.linear_fc2.bias", when="mlp_bias", layers="dense"),
)


def experts(module: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return the rows of a router and its experts, by their names in files.

    The native layers stack each rank's experts: `[E / ep, ...]`.
    """
    expert = f"{LAYER}{module}.experts.{{e}}."
    local = f"{MEGATRON}mlp.experts.local_experts.{{j}}."
    return (
        Row(
            {f"{LAYER}{module}.gate.weight": "E H"},
            parallel=f"{LAYER}mlp.gate.weight",
            megatron=f"{MEGATRON}mlp.router.weight",
            layers="moe",
        ),
        Row(
            {f"{expert}{gate}.weight": "M/etp H", f"{expert}{up}.weight": "M/etp H"},
            parallel=f"{LAYER}mlp.experts.gate_up_proj",
            megatron=f"{local}linear_fc1.weight",
            megatron_te=f"{MEGATRON}mlp.experts.linear_fc1.weight{{j}}",
            layers="moe",
        ),
        Row(
            {f"{expert}{down}.weight": "H M/etp"},
            parallel=f"{LAYER}mlp.experts.down_proj",
            megatron=f"{local}linear_fc2.weight",
            megatron_te=f"{MEGATRON}mlp.experts.linear_fc2.weight{{j}}",
            layers="moe",
        ),
    )
