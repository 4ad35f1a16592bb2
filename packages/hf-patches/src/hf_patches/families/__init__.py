"""What each family needs beyond the general mechanism: one short entry of data a file."""

from typing import Any

from hf_patches.families import (
    apertus,
    cohere2,
    deepseek,
    gemma,
    glm4,
    glm4v,
    gpt_oss,
    granite,
    kimi_vl,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_vl,
    seed_oss,
    smollm3,
)
from hf_patches.families.base import Family, HeadScaling
from hf_patches.families.refused import refuse

__all__ = ["FAMILIES", "Family", "HeadScaling", "family_of", "supported_model_types"]

_MODULES = (
    apertus,
    cohere2,
    deepseek,
    gemma,
    glm4,
    glm4v,
    gpt_oss,
    granite,
    kimi_vl,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_vl,
    seed_oss,
    smollm3,
)

FAMILIES: dict[str, Family] = {
    model_type: family for module in _MODULES for family in module.FAMILIES for model_type in family.model_types
}


def supported_model_types() -> tuple[str, ...]:
    """The `config.model_type`s that `patch` accepts."""
    return tuple(sorted(FAMILIES))


def family_of(config: Any) -> Family:
    """The family of a model by its config.

    Raises ValueError for one whose layers cannot be packed, by name and with the reason, and for an unknown one, with
    the list of those known.
    """
    refuse(config)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} is not among the families that patch() knows: "
            f"{', '.join(supported_model_types())}"
        )
    return family
