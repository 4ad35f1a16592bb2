"""Families of models: their entries in the table, and the models that are refused."""

from typing import Any

from hf_patches.families.refused import refuse
from hf_patches.families.table import FAMILIES, Family, HeadScaling

__all__ = ["FAMILIES", "Family", "HeadScaling", "family_of", "supported_model_types"]


def supported_model_types() -> tuple[str, ...]:
    """Return the `config.model_type`s that `patch` accepts."""
    return tuple(sorted(FAMILIES))


def family_of(config: Any) -> Family:
    """Return the family of a model by its config.

    Raises:
        ValueError: The layers of the model cannot be packed (with the reason), or the family is unknown (with the list
            of known families).
    """
    refuse(config)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} is not among the families that patch() knows: "
            f"{', '.join(supported_model_types())}"
        )
    return family
