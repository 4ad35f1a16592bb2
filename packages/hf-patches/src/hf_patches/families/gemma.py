"""Gemma 2 and 3 (text): logits are soft-capped; so are attention scores, which the model asks of attention itself."""

from hf_patches.families.base import Family

FAMILIES = (Family(model_types=("gemma2", "gemma3_text"), logits_softcap="final_logit_softcapping"),)
