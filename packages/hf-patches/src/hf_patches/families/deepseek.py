"""DeepSeek-V2 and V3: latent attention, whose rope key is shared by all heads and whose value heads are smaller."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("deepseek_v2", "deepseek_v3"), experts=True),)
