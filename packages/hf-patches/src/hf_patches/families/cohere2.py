"""Cohere 2: logits are multiplied by `logit_scale`; windows by layer."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("cohere2",), logits_multiplier="logit_scale"),)
