"""OLMo 2: QK-norm over all heads and norms after the blocks, all inside the model."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("olmo2",)),)
