"""What each family needs beyond the general mechanism, and which models are refused."""

from typing import Any

from hf_patches.families.base import Family, HeadScaling
from hf_patches.families.refused import refuse
from hf_patches.families.table import FAMILIES

__all__ = ["FAMILIES", "Family", "HeadScaling", "family_of", "supported_model_types"]


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
