"""SmolLM3: some layers without rotary embedding, inside the model."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("smollm3",)),)
