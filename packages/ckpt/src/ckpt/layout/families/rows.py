"""Rows that families share: both ends of a model, grouped-query attention, the gated MLP and routed experts."""

from collections.abc import Mapping

from ckpt.layout.families.table import Layers, Role, Row

_EMBEDDING = {"model.embed_tokens.weight": "V/tp H"}
_WITH_HEAD: tuple[Role, ...] = ("causal_lm", "causal_lm_with_value")
_WITH_VALUE: tuple[Role, ...] = ("value", "causal_lm_with_value")

# The names that files may give a value head.
VALUE_HEADS = ("score.weight", "v_head.summary.weight", "v_head.weight", "reward_head.weight")

ENDS = (
    Row(_EMBEDDING, "embedding.word_embeddings.weight", where="first", tied="no"),
    Row(_EMBEDDING, "embedding.word_embeddings.weight", where="first", tied="yes", aliases=("lm_head.weight",)),
    Row({"model.norm.weight": "H"}, "decoder.final_layernorm.weight", where="last"),
    Row({"lm_head.weight": "V/tp H"}, "output_layer.weight", where="last", roles=_WITH_HEAD, tied="no"),
    Row(_EMBEDDING, "output_layer.weight", "lm_head.weight", where="last", roles=_WITH_HEAD, tied="yes"),
    Row(
        {"score.weight": "L H"},
        "output_layer.weight",
        where="last",
        roles=_WITH_VALUE,
        optional=True,
        aliases=(*VALUE_HEADS[1:], "lm_head.weight"),
    ),
    Row(
        {"score.bias": "L"},
        "output_layer.bias",
        where="last",
        roles=_WITH_VALUE,
        optional=True,
        aliases=("v_head.summary.bias", "v_head.bias", "reward_head.bias"),
    ),
)


def _qkv(kind: str, shape: str, when: str | None) -> Row:
    return Row(
        {
            f"self_attn.q_proj.{kind}": f"Q/tp{shape}",
            f"self_attn.k_proj.{kind}": f"KV/tp{shape}",
            f"self_attn.v_proj.{kind}": f"KV/tp{shape}",
        },
        f"self_attention.linear_qkv.{kind}",
        parallel=f"self_attn.qkv_proj.{kind}",
        megatron_order="groups",
        when=when,
    )


# Flags: qkv_bias, o_bias, qk_norm.
ATTENTION = (
    _qkv("weight", " H", None),
    _qkv("bias", "", "qkv_bias"),
    Row({"self_attn.q_norm.weight": "D"}, "self_attention.q_layernorm.weight", when="qk_norm"),
    Row({"self_attn.k_norm.weight": "D"}, "self_attention.k_layernorm.weight", when="qk_norm"),
    Row({"self_attn.o_proj.weight": "H Q/tp"}, "self_attention.linear_proj.weight"),
    Row({"self_attn.o_proj.bias": "H"}, "self_attention.linear_proj.bias", when="o_bias"),
)


def norms(
    first: str,
    second: str,
    first_te: str = "self_attention.linear_qkv.layer_norm_weight",
    parallel: str = "post_attention_layernorm.weight",
) -> tuple[Row, ...]:
    """Return the rows of the norms before attention and before the MLP, by their names in files.

    Transformer Engine holds the first norm in the fused projection behind it (`first_te`); in dense layers the second
    norm as well. `parallel` is the name of the second norm on the native layers.
    """
    megatron = "pre_mlp_layernorm.weight"
    te = "mlp.linear_fc1.layer_norm_weight"
    return (
        Row({f"{first}.weight": "H"}, "input_layernorm.weight", "input_layernorm.weight", first_te),
        Row({f"{second}.weight": "H"}, megatron, parallel, te, layers="dense"),
        Row({f"{second}.weight": "H"}, megatron, parallel, layers="moe"),
    )


NORMS = norms("input_layernorm", "post_attention_layernorm")

# A multi-token-prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2) beside the rows of a decoder layer. The
# model shares its embedding and its head with the layer; published files repeat both.
PREDICTING = (
    Row(
        {"embed_tokens.weight": "V/tp H"},
        where="predicting_first",
        aliases=("model.embed_tokens.weight",),
        copy_of="model.embed_tokens.weight",
    ),
    Row(_EMBEDDING, parallel="mtp.embed_tokens.weight", where="last", roles=_WITH_HEAD, tied="no"),
    Row({"enorm.weight": "H"}, where="predicting"),
    Row({"hnorm.weight": "H"}, where="predicting"),
    Row({"eh_proj.weight": "H HH"}, where="predicting"),
    Row({"shared_head.norm.weight": "H"}, where="predicting"),
    Row(
        {"shared_head.head.weight": "V/tp H"},
        where="predicting",
        aliases=("lm_head.weight", "model.embed_tokens.weight"),
        copy_of="lm_head.weight",
    ),
)


def gate_up(module: str, kind: str, shape: str, when: str | None = None, layers: Layers = "dense") -> Row:
    """Return the row of a gated MLP's two input projections, fused; `module` is "mlp" or a module in it."""
    return Row(
        {f"{module}.gate_proj.{kind}": shape, f"{module}.up_proj.{kind}": shape},
        f"{module}.linear_fc1.{kind}",
        parallel=f"{module}.gate_up_proj.{kind}",
        when=when,
        layers=layers,
    )


# Flag: mlp_bias.
GATED_MLP = (
    gate_up("mlp", "weight", "I/tp H"),
    gate_up("mlp", "bias", "I/tp", when="mlp_bias"),
    Row({"mlp.down_proj.weight": "H I/tp"}, "mlp.linear_fc2.weight", layers="dense"),
    Row({"mlp.down_proj.bias": "H"}, "mlp.linear_fc2.bias", when="mlp_bias", layers="dense"),
)


def stacked_experts(router: str, gate_up: Mapping[str, str], down: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the rows of a router and its experts, by the names and shapes in files.

    The native layers stack each rank's experts: `[E / ep, ...]`.
    """
    matrices = ((gate_up, "gate_up_proj", "linear_fc1"), (down, "down_proj", "linear_fc2"))
    return (
        Row({router: "E H"}, "mlp.router.weight", "mlp.gate.weight", layers="moe"),
        *(
            Row(
                sources,
                f"mlp.experts.local_experts.{{j}}.{megatron}.weight",
                f"mlp.experts.{parallel}",
                f"mlp.experts.{megatron}.weight{{j}}",
                layers="moe",
            )
            for sources, parallel, megatron in matrices
        ),
    )


def experts(module: str, gate: str, up: str, down: str, width: str = "M") -> tuple[Row, ...]:
    """Return the rows of a router and its experts of a width, where files have each expert's projections."""
    expert = f"{module}.experts.{{e}}."
    return stacked_experts(
        f"{module}.gate.weight",
        {f"{expert}{gate}.weight": f"{width}/etp H", f"{expert}{up}.weight": f"{width}/etp H"},
        {f"{expert}{down}.weight": f"H {width}/etp"},
    )


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")


def shared_experts(module: str, width: str) -> tuple[Row, ...]:
    """Return the rows of the MLP that every token takes, by its name in files and its width."""
    return (
        Row(
            {f"{module}.gate_proj.weight": f"{width}/tp H", f"{module}.up_proj.weight": f"{width}/tp H"},
            "mlp.shared_experts.linear_fc1.weight",
            "mlp.shared_experts.gate_up_proj.weight",
            layers="moe",
        ),
        Row(
            {f"{module}.down_proj.weight": f"H {width}/tp"},
            "mlp.shared_experts.linear_fc2.weight",
            "mlp.shared_experts.down_proj.weight",
            layers="moe",
        ),
    )


# Qwen2-MoE's shared expert has a separate gate.
QWEN2_SHARED_EXPERT = (
    *shared_experts("mlp.shared_expert", "SE"),
    Row({"mlp.shared_expert_gate.weight": "L H"}, "mlp.shared_experts.gate_weight", layers="moe"),
)
