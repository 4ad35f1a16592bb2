"""Megatron-Core GPT models from Hugging Face configs, on packed batches."""

from megatron_utils.gpt.config import FAMILIES, transformer_config
from megatron_utils.gpt.memory import save_memory
from megatron_utils.gpt.model import PackedGPTModel, build_gpt
from megatron_utils.gpt.modules import PackedCoreAttention

__all__ = [
    "FAMILIES",
    "PackedCoreAttention",
    "PackedGPTModel",
    "build_gpt",
    "save_memory",
    "transformer_config",
]
