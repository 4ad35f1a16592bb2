"""Phi-3 and Phi-4: fused QKV and gate-up projections inside the model; a window for all layers."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("phi3",)),)
