"""GLM-4 and GLM-4-MoE: partial rotary embedding inside the model."""

from hf_patches.families.base import Family

FAMILIES = (
    Family(model_types=("glm4",)),
    Family(model_types=("glm4_moe",), experts=True),
)
