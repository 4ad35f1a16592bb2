"""Megatron-Core GPT models from Hugging Face configs, on packed batches."""

from megatron_utils.gpt.config import FAMILIES, Family, hf_config, transformer_config
from megatron_utils.gpt.model import PackedGPTModel, build_gpt
from megatron_utils.gpt.modules import Norm, PackedCoreAttention, PackedParams, ValueHead

__all__ = [
    "FAMILIES",
    "Family",
    "Norm",
    "PackedCoreAttention",
    "PackedGPTModel",
    "PackedParams",
    "ValueHead",
    "build_gpt",
    "hf_config",
    "transformer_config",
]
