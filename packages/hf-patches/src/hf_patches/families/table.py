"""The table of families: the needs of each beyond the general mechanism.

The modules of transformers compute norms, windows, soft-caps of scores, sinks, biases and partial rotations themselves,
so these need no entry: `patch` replaces attention, the head and the kernels only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadScaling:
    """The transform of the logits z of the head: softcap * tanh(factor * z / softcap), or factor * z."""

    factor: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Vision:
    """The input of a vision tower: the shape of one patch of pixels, and the patches merged into one token.

    `multi_section`: positions have three more rows (time, height, width), which `get_rope_index` computes.
    """

    multi_section: bool
    patch_shape: Callable[[Any], tuple[int, ...]]
    merge: Callable[[Any], tuple[int, int]]


@dataclass(frozen=True)
class Family:
    """One family of models. Fields with a string hold the name of an attribute of the text config."""

    model_types: tuple[str, ...]
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    # Routed experts: tokens of different sequences share a GEMM, whose rounding depends on all of them.
    experts: bool = False
    # A vision tower besides the text backbone.
    vision: Vision | None = None

    def head_scaling(self, config: Any) -> HeadScaling:
        """Return the factor and soft-cap of one config."""
        factor = 1.0
        if self.logits_multiplier is not None:
            factor *= getattr(config, self.logits_multiplier)
        if self.logits_divisor is not None:
            factor /= getattr(config, self.logits_divisor)
        return HeadScaling(factor, getattr(config, self.logits_softcap) if self.logits_softcap else None)


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
        Family(
            (
                "apertus",
                "ernie4_5",
                "exaone4",
                "glm4",
                "llama",
                "mistral",
                "olmo2",
                "olmo3",
                "phi3",
                "qwen2",
                "qwen3",
                "seed_oss",
                "smollm3",
            )
        ),
        Family(
            (
                *(
                    "deepseek_v2",
                    "deepseek_v3",
                    "glm4_moe",
                    "glm4_moe_lite",
                    "gpt_oss",
                    "mixtral",
                    "qwen2_moe",
                ),
                "qwen3_moe",
            ),
            experts=True,
        ),
        Family(("cohere2",), logits_multiplier="logit_scale"),
        Family(("gemma2", "gemma3_text"), logits_softcap="final_logit_softcapping"),
        Family(("granite",), logits_divisor="logits_scaling"),
        Family(("granitemoe",), logits_divisor="logits_scaling", experts=True),
        Family(("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"), vision=_FLAT_PATCHES),
        Family(("glm4v_moe", "qwen3_vl_moe"), vision=_FLAT_PATCHES, experts=True),
        Family(("kimi_k25",), vision=_SQUARE_PATCHES, experts=True),
    )
    for model_type in family.model_types
}
