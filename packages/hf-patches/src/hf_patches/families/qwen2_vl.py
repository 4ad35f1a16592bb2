"""Qwen2-VL and Qwen2.5-VL: flat patches, positions of three sections."""

from hf_patches.families.base import FLAT_PATCHES, Family

FAMILIES = (
    Family(
        model_types=(
            "qwen2_vl",
            "qwen2_5_vl",
        ),
        vision=FLAT_PATCHES,
    ),
)
