"""GLM-4V: flat patches, positions of three sections; frames of a video share the token of images."""

from hf_patches.families.base import FLAT_PATCHES, Family

FAMILIES = (Family(model_types=("glm4v",), vision=FLAT_PATCHES),)
