"""Gemma 4: full-attention layers have other sizes and numbers of heads; their values may be the keys."""

from ckpt.layout.families.rows import ENDS, GATED_MLP, gate_up
from ckpt.layout.families.table import ROTARY_BUFFERS, Family, Layers, Row


def _attention(layers: Layers, reusing: Layers, queries: str, keys: str, size: str) -> tuple[Row, ...]:
    shapes = {f"self_attn.{name}_proj.weight": f"{rows}/tp H" for name, rows in (("q", queries), ("k", keys))}
    with_values = shapes | {"self_attn.v_proj.weight": f"{keys}/tp H"}
    fused = "self_attn.qkv_proj.weight"
    return (
        Row(with_values, parallel=fused, layers=layers, when="not keys_as_values" if layers == "full" else None),
        *((Row(shapes, parallel=fused, layers=layers, when="keys_as_values"),) if layers == "full" else ()),
        Row({"self_attn.k_norm.weight": size}, layers=layers),
        Row({"self_attn.q_proj.weight": f"{queries}/tp H"}, parallel=fused, layers=reusing),
        *(Row({"self_attn.q_norm.weight": size}, layers=kind) for kind in (layers, reusing)),
        *(Row({"self_attn.o_proj.weight": f"H {queries}/tp"}, layers=kind) for kind in (layers, reusing)),
    )


_LAYERS = (
    *_attention("sliding", "reusing sliding", "Q", "KV", "D"),
    *_attention("full", "reusing full", "GQ", "GKV", "GD"),
    *(
        Row({f"{name}_layernorm.weight": "H"})
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    ),
    Row({"layer_scalar": "ONE"}),
    # Layers that reuse keys and values may have an MLP of twice the width.
    gate_up("mlp", "weight", "I2/tp H", layers="wide"),
    Row({"mlp.down_proj.weight": "H I2/tp"}, layers="wide"),
    # Per-layer embeddings.
    Row({"per_layer_input_gate.weight": "P H"}, when="per_layer"),
    Row({"per_layer_projection.weight": "H P"}, when="per_layer"),
    Row({"post_per_layer_input_norm.weight": "H"}, when="per_layer"),
    Row(
        {"model.embed_tokens_per_layer.weight": "VP/tp LP"},
        parallel="model.per_layer_tables.{first}.weight",
        where="chunk",
        when="per_layer",
    ),
    *(
        Row(
            {f"model.{name}.weight": shape}, parallel=f"model.per_layer.{local}.weight", where="first", when="per_layer"
        )
        for name, local, shape in (
            ("per_layer_model_projection", "projection", "LP H"),
            ("per_layer_projection_norm", "norm", "P"),
        )
    ),
)

# Every layer has an MLP beside its experts. Files stack the experts.
_EXPERTS = tuple(
    Row(sources, parallel=f"mlp.{local}", layers="moe")
    for local, sources in {
        "shared_experts.gate_up_proj.weight": {"mlp.gate_proj.weight": "I/tp H", "mlp.up_proj.weight": "I/tp H"},
        "shared_experts.down_proj.weight": {"mlp.down_proj.weight": "H I/tp"},
        "gate.weight": {"router.proj.weight": "E H"},
        "gate.scale": {"router.scale": "H"},
        "gate.per_expert_scale": {"router.per_expert_scale": "E"},
        "experts.gate_up_proj": {"experts.gate_up_proj": "E/ep M/etp+M/etp H"},
        "experts.down_proj": {"experts.down_proj": "E/ep H M/etp"},
        "shared_output_norm.weight": {"post_feedforward_layernorm_1.weight": "H"},
        "routed_norm.weight": {"pre_feedforward_layernorm_2.weight": "H"},
        "routed_output_norm.weight": {"post_feedforward_layernorm_2.weight": "H"},
    }.items()
)

GEMMA4 = Family(
    "gemma4_text",
    "Gemma4",
    (*ENDS, *_LAYERS, *GATED_MLP, *_EXPERTS),
    {
        "keys_as_values": "attention_k_eq_v",
        "per_layer": ("hidden_size_per_layer_input", True),
        "reusing": "num_kv_shared_layers",
    },
    tied=True,
    experts="enable_moe_block",
    # Published files hold keys and values of layers that reuse others; transformers ignores them, too.
    ignored=(ROTARY_BUFFERS, r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."),
)
