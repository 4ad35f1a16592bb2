"""Qwen2 and Qwen2.5: attention bias, and a window by layer that the model hands to attention."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("qwen2",)),)
