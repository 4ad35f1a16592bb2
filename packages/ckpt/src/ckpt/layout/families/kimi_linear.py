"""Kimi Linear: Kimi's delta attention (arXiv:2510.26692) beside latent attention without rotation, and experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckpt.layout.families.deepseek_v3 import LATENT_ATTENTION, LATENT_FLAGS
from ckpt.layout.families.gated_delta_net import beside_linear
from ckpt.layout.families.rows import ENDS, GATED_MLP, NORMS, experts, shared_experts
from ckpt.layout.families.table import Family, Row

_DELTA_ATTENTION = tuple(
    Row(
        {f"self_attn.{name}": shape for name, shape in sources.items()},
        parallel=f"linear_attn.{local}",
        layers="linear",
        keep_dtype=local.startswith(("conv1d", "decay")),
        # Files have A_log as [1, 1, heads, 1].
        flat=2 if local == "decay.A_log" else 0,
    )
    for local, sources in {
        "in_proj_qkv.weight": {f"{kind}_proj.weight": "KQ/tp H" for kind in "qkv"},
        "in_proj_fgb.weight": {"f_a_proj.weight": "KD H", "g_a_proj.weight": "KD H", "b_proj.weight": "KH H"},
        "f_b_proj.weight": {"f_b_proj.weight": "KQ/tp KD"},
        "g_b_proj.weight": {"g_b_proj.weight": "KQ/tp KD"},
        "conv1d.weight": {f"{kind}_conv1d.weight": "KQ/tp L DW" for kind in "qkv"},
        "decay.A_log": {"A_log": "L L KH/tp L"},
        "decay.dt_bias": {"dt_bias": "KQ/tp"},
        "norm.weight": {"o_norm.weight": "KD"},
        "out_proj.weight": {"o_proj.weight": "H KQ/tp"},
    }.items()
)
# The router is fp32 beside weights of any dtype.
_EXPERTS = (
    *(
        dataclasses.replace(row, keep_dtype=any(source.endswith(".gate.weight") for source in row.sources))
        for row in experts("block_sparse_moe", "w1", "w3", "w2")
    ),
    Row(
        {"block_sparse_moe.gate.e_score_correction_bias": "E"},
        parallel="mlp.gate.e_score_correction_bias",
        layers="moe",
        keep_dtype=True,
    ),
    *shared_experts("block_sparse_moe.shared_experts", "KS"),
)


def _attends(config: Mapping[str, Any], layer: int, num_layers: int) -> bool:
    """Return whether published configs list the layer, counted from 1; each fourth behind the first without a list."""
    listed = (config.get("linear_attn_config") or {}).get("full_attn_layers")
    return layer > 0 and layer % 4 == 0 if listed is None else layer + 1 in listed


KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinear",
    (*ENDS, *NORMS, *beside_linear(LATENT_ATTENTION), *_DELTA_ATTENTION, *GATED_MLP, *_EXPERTS),
    LATENT_FLAGS,
    attends=_attends,
    # transformers saves the MLPs of dense layers under the name of the experts' module.
    modules={
        "mlp": "block_sparse_moe",
        **{f"self_attn.forget_gate.{name}": f"self_attn.{name}" for name in ("f_a_proj", "f_b_proj")},
    },
)
