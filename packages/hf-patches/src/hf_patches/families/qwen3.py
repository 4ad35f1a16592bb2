"""Qwen3 and Qwen3-MoE: QK-norm and an explicit head size, inside the model."""

from hf_patches.families.base import Family

FAMILIES = (
    Family(model_types=("qwen3",)),
    Family(model_types=("qwen3_moe",), experts=True),
)
