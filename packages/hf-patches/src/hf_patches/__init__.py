"""Patches of Hugging Face models for RL: packed input, Ulysses sequence parallelism, fused log-probs and entropy."""

from hf_patches.call import PackedOutput
from hf_patches.families import supported_model_types
from hf_patches.patching import Patch, patch
from hf_patches.report import Report
from parallel_layers.data.prefixes import SharedPrefixes, share_prefixes

__all__ = ["PackedOutput", "Patch", "Report", "SharedPrefixes", "patch", "share_prefixes", "supported_model_types"]
