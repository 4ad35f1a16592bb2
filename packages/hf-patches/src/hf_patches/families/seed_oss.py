"""Seed-OSS: nothing beyond the general mechanism; its checkpoints ask for attention dropout, which must be 0."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("seed_oss",)),)
