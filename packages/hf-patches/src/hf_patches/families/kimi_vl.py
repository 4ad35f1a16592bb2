"""Kimi's vision-language model in transformers' form (Kimi-K2.5): DeepSeek-V3 text, square patches, plain positions."""

from typing import Any

from hf_patches.families.base import Family, Vision


def _patch_shape(config: Any) -> tuple[int, ...]:
    return (3, config.patch_size, config.patch_size)


def _merge(config: Any) -> tuple[int, int]:
    return tuple(config.merge_kernel_size)


_VISION = Vision(multi_section=False, patch_shape=_patch_shape, merge=_merge)

FAMILIES = (Family(model_types=("kimi_k25",), vision=_VISION, experts=True),)
