"""The table of families: the needs of each beyond the general mechanism.

The modules of transformers compute norms, windows, soft-caps of scores, sinks, biases and partial rotations themselves,
so these need no entry: `patch` replaces attention, the head and the kernels only. `patch` measures how a model scales
its logits, and finds routed experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vision:
    """The input of a vision tower: the shape of one patch of pixels, and the patches merged into one token.

    `multi_section`: positions have three more rows (time, height, width), which `get_rope_index` computes.
    `videos`: transformers computes videos of several frames.
    """

    multi_section: bool
    videos: bool
    patch_shape: Callable[[Any], tuple[int, ...]]
    merge: Callable[[Any], tuple[int, int]]


def _flat_patch(config: Any) -> tuple[int, ...]:
    return (config.in_channels * config.temporal_patch_size * config.patch_size**2,)


def _square_merge(config: Any) -> tuple[int, int]:
    return (config.spatial_merge_size, config.spatial_merge_size)


def _square_patch(config: Any) -> tuple[int, ...]:
    return (3, config.patch_size, config.patch_size)


def _kernel_merge(config: Any) -> tuple[int, int]:
    return tuple(config.merge_kernel_size)


# Positions of three sections (time, height, width); frames of a video share the token of images.
_FLAT_PATCHES = Vision(multi_section=True, videos=True, patch_shape=_flat_patch, merge=_square_merge)
# Kimi-K2.5: plain positions. Its tower pools the frames of a video, and transformers then counts a token a frame.
_SQUARE_PATCHES = Vision(multi_section=False, videos=False, patch_shape=_square_patch, merge=_kernel_merge)

_TEXT = (
    *("apertus", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma2"),
    *(
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "granitemoe",
        "llama",
        "minimax_m2",
    ),
    *("ministral3", "mistral", "mixtral", "olmo2", "olmo3"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
)

# Families with recurrent layers, by the model_type of their text model (`hf_patches.linear_attention`).
RECURRENT = (
    *("granitemoehybrid", "kimi_linear", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)

# The families that the tests compare with unpatched transformers, by model_type; None: text alone.
FAMILIES: dict[str, Vision | None] = {
    **dict.fromkeys((*_TEXT, *RECURRENT)),
    **dict.fromkeys(("glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl"), _FLAT_PATCHES),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _FLAT_PATCHES),
    "kimi_k25": _SQUARE_PATCHES,
}
