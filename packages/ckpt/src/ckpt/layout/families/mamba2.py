"""Rows of a Mamba-2 layer (arXiv:2405.21060), and families with such layers: Granite's hybrids and Nemotron-H."""

import dataclasses

from ckpt.layout.families.gated_delta_net import beside_linear
from ckpt.layout.families.rows import ATTENTION, ENDS, NORMS, stacked_experts
from ckpt.layout.families.table import ROTARY_BUFFERS, Family, Layers, Row


def mamba2(module: str) -> tuple[Row, ...]:
    """Return the rows of a Mamba-2 layer by its name in files. Flags: conv_bias, projection_bias."""
    convolved = "MX/tp+MG/tp+MG/tp"
    return tuple(
        Row(
            {f"{module}.{name}": shape},
            # Megatron-Core's projections have no bias.
            "" if when == "projection_bias" else f"mixer.{name}",
            f"linear_attn.{local}",
            layers="linear",
            when=when,
            keep_dtype=wide,
        )
        for name, shape, local, when, wide in (
            ("in_proj.weight", f"MX/tp+{convolved}+MH/tp H", "in_proj.weight", None, False),
            ("in_proj.bias", f"MX/tp+{convolved}+MH/tp", "in_proj.bias", "projection_bias", False),
            ("conv1d.weight", f"{convolved} L MW", "conv1d.weight", None, True),
            ("conv1d.bias", convolved, "conv1d.bias", "conv_bias", True),
            ("A_log", "MH/tp", "state_space.A_log", None, True),
            ("D", "MH/tp", "state_space.D", None, True),
            ("dt_bias", "MH/tp", "state_space.dt_bias", None, True),
            ("norm.weight", "MX/tp", "norm.weight", None, False),
            ("out_proj.weight", "H MX/tp", "out_proj.weight", None, False),
            ("out_proj.bias", "H", "out_proj.bias", "projection_bias", False),
        )
    )


# Files of GraniteMoE stack the experts.
GRANITE_EXPERTS = stacked_experts(
    "block_sparse_moe.router.layer.weight",
    {"block_sparse_moe.input_linear.weight": "E/ep I/etp+I/etp H"},
    {"block_sparse_moe.output_linear.weight": "E/ep H I/etp"},
)
# Every token takes this MLP, beside experts or alone.
_MODULES: dict[Layers, str] = {"dense": "mlp", "moe": "mlp.shared_experts"}
_SHARED_MLP = tuple(
    Row({f"shared_mlp.{name}.weight": shape}, parallel=f"{module}.{local}.weight", layers=layers)
    for layers, module in _MODULES.items()
    for name, shape, local in (
        ("input_linear", "SI/tp+SI/tp H", "gate_up_proj"),
        ("output_linear", "H SI/tp", "down_proj"),
    )
)

GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybrid",
    (*ENDS, *NORMS, *beside_linear(ATTENTION), *mamba2("mamba"), *GRANITE_EXPERTS, *_SHARED_MLP),
    {
        "qkv_bias": "attention_bias",
        "o_bias": "attention_bias",
        "conv_bias": ("mamba_conv_bias", True),
        "projection_bias": "mamba_proj_bias",
    },
    attends=lambda config, layer, num_layers: False,
)

# One mixer a layer, behind one norm, which Megatron-Core names by the kind of the layer.
_NORM_NAMES: tuple[tuple[Layers, str, str], ...] = (
    ("linear", "norm", "mixer.in_proj"),
    ("full", "input_layernorm", "self_attention.linear_qkv"),
    ("dense", "pre_mlp_layernorm", "mlp.linear_fc1"),
    ("moe", "pre_mlp_layernorm", ""),
)
_NORMS = tuple(
    Row({"norm.weight": "H"}, f"{name}.weight", "norm.weight", fused and f"{fused}.layer_norm_weight", layers=layers)
    for layers, name, fused in _NORM_NAMES
)
_ATTENTION = tuple(
    dataclasses.replace(
        row,
        sources={name.replace("self_attn.", "mixer."): shape for name, shape in row.sources.items()},
        parallel=row.parallel or next(iter(row.sources)),
        layers="full",
    )
    for row in ATTENTION
)
# Layers, names and shapes in files, and the names in the MLP of the native layers and of Megatron-Core (empty: none).
_TENSORS: tuple[tuple[Layers, str, str, str, str], ...] = (
    ("dense", "up_proj.weight", "I/tp H", "up_proj.weight", "linear_fc1.weight"),
    ("dense", "down_proj.weight", "H I/tp", "down_proj.weight", "linear_fc2.weight"),
    ("dense", "up_proj.bias", "I/tp", "up_proj.bias", ""),
    ("dense", "down_proj.bias", "H", "down_proj.bias", ""),
    ("moe", "gate.weight", "E H", "gate.weight", "router.weight"),
    ("moe", "gate.e_score_correction_bias", "E", "gate.e_score_correction_bias", "router.expert_bias"),
    ("moe", "fc1_latent_proj.weight", "MI H", "latent_in_proj.weight", ""),
    ("moe", "fc2_latent_proj.weight", "H MI", "latent_out_proj.weight", ""),
    (
        "moe",
        "shared_experts.up_proj.weight",
        "MS/tp H",
        "shared_experts.up_proj.weight",
        "shared_experts.linear_fc1.weight",
    ),
    (
        "moe",
        "shared_experts.down_proj.weight",
        "H MS/tp",
        "shared_experts.down_proj.weight",
        "shared_experts.linear_fc2.weight",
    ),
)
_MIXERS = tuple(
    Row(
        {f"mixer.{name}": shape},
        megatron and f"mlp.{megatron}",
        f"mlp.{local}",
        layers=layers,
        when="latent" if "latent" in name else "mlp_bias" if name.endswith("proj.bias") else None,
        # The router is fp32 beside weights of any dtype.
        keep_dtype=name.startswith("gate."),
    )
    for layers, name, shape, local, megatron in _TENSORS
)
_EXPERTS = tuple(
    Row(
        {f"mixer.experts.{{e}}.{name}.weight": shape},
        f"mlp.experts.local_experts.{{j}}.{megatron}.weight",
        f"mlp.experts.{name}",
        f"mlp.experts.{megatron}.weight{{j}}",
        layers="moe",
    )
    for name, shape, megatron in (("up_proj", "M/etp MI", "linear_fc1"), ("down_proj", "MI M/etp", "linear_fc2"))
)
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronH",
    (
        *(dataclasses.replace(row, megatron=row.megatron.replace("final_layernorm", "final_norm")) for row in ENDS),
        *_NORMS,
        *_ATTENTION,
        *mamba2("mixer"),
        *_MIXERS,
        *_EXPERTS,
    ),
    # No row asks for the flag "shared": every mixture has shared experts.
    {
        "conv_bias": ("use_conv_bias", True),
        "projection_bias": "use_bias",
        "latent": "moe_latent_size",
        "mlp_bias": "mlp_bias",
        "shared": "n_shared_experts",
    },
    one_mixer=True,
    prefixes=("backbone.", "model."),
    ends={
        "model.embed_tokens.": ("backbone.embeddings.", "model.embeddings."),
        "model.norm.": ("backbone.norm_f.", "model.norm_f."),
    },
    without_adapter=(".out_proj.weight",),
    expert_module="mixer",
    # transformers has no class for the layers of multi-token prediction.
    ignored=(ROTARY_BUFFERS, r"^mtp\."),
)
