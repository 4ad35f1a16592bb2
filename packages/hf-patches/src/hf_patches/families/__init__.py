"""Families of models: their entries in the table, and the models that are refused."""

from typing import Any

from hf_patches.families.refused import refuse
from hf_patches.families.table import FAMILIES, Vision

__all__ = ["FAMILIES", "Vision", "supported_model_types", "vision_of"]


def supported_model_types() -> tuple[str, ...]:
    """Return the `config.model_type`s that `patch` accepts without a proof at the start."""
    return tuple(sorted(FAMILIES))


def vision_of(config: Any, family: str | None = None) -> Vision | None:
    """Return the vision tower's input of a model by its config; None for a text model.

    Raises:
        ValueError: The layers of the model cannot be packed (with the reason), the family is unknown (with the list of
            known families), or is unknown and has more than text with `family="auto"`.
    """
    if family not in (None, "auto"):
        raise ValueError(f"family={family!r} must be 'auto', or None for the families of the table")
    refuse(config)
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} is not among the families that patch() knows: "
            f"{', '.join(supported_model_types())}; pass family='auto' to prove the patch on this model first"
        )
    if config.get_text_config() is not config:
        raise ValueError(
            f"family='auto' proves text models, and model_type={config.model_type!r} has other inputs; load its text "
            "model alone"
        )
    return None
