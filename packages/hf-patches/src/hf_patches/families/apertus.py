"""Apertus: QK-norm and its own activation, both inside its modules."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("apertus",)),)
