"""Qwen3-VL and Qwen3-VL-MoE: as Qwen2-VL, and DeepStack rows for the first layers."""

from hf_patches.families.base import FLAT_PATCHES, Family

FAMILIES = (
    Family(model_types=("qwen3_vl",), vision=FLAT_PATCHES),
    Family(model_types=("qwen3_vl_moe",), vision=FLAT_PATCHES, experts=True),
)
