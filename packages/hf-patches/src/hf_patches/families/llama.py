"""Llama 1 to 3.3: nothing beyond the general mechanism."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("llama",)),)
