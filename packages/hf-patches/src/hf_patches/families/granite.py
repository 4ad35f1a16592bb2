"""Granite: logits are divided by `logits_scaling`."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("granite",), logits_divisor="logits_scaling"),)
