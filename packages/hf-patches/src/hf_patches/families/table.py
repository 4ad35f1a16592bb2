"""The table of families: the needs of each beyond the general mechanism.

The modules of transformers compute norms, windows, soft-caps of scores, sinks, biases and partial rotations themselves,
so these need no entry: `patch` replaces attention, the head and the kernels only.
"""

from typing import Any

from hf_patches.families.base import Family, Vision


def _flat_patch(config: Any) -> tuple[int, ...]:
    return (config.in_channels * config.temporal_patch_size * config.patch_size**2,)


def _square_merge(config: Any) -> tuple[int, int]:
    return (config.spatial_merge_size, config.spatial_merge_size)


def _square_patch(config: Any) -> tuple[int, ...]:
    return (3, config.patch_size, config.patch_size)


def _kernel_merge(config: Any) -> tuple[int, int]:
    return tuple(config.merge_kernel_size)


# Positions of three sections (time, height, width); frames of a video share the token of images.
_FLAT_PATCHES = Vision(multi_section=True, patch_shape=_flat_patch, merge=_square_merge)
# Kimi-K2.5: plain positions.
_SQUARE_PATCHES = Vision(multi_section=False, patch_shape=_square_patch, merge=_kernel_merge)

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        Family(("apertus", "glm4", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3")),
        Family(("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe"), experts=True),
        Family(("cohere2",), logits_multiplier="logit_scale"),
        Family(("gemma2", "gemma3_text"), logits_softcap="final_logit_softcapping"),
        Family(("granite",), logits_divisor="logits_scaling"),
        Family(("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"), vision=_FLAT_PATCHES),
        Family(("qwen3_vl_moe",), vision=_FLAT_PATCHES, experts=True),
        Family(("kimi_k25",), vision=_SQUARE_PATCHES, experts=True),
    )
    for model_type in family.model_types
}
