"""gpt-oss: attention sinks, which follow their heads, and windows by layer."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("gpt_oss",), experts=True),)
