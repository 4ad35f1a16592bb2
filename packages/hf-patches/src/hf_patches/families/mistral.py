"""Mistral and Mixtral: one window for all layers, handed to attention by the model."""

from hf_patches.families.base import Family

FAMILIES = (
    Family(model_types=("mistral",)),
    Family(model_types=("mixtral",), experts=True),
)
