"""Write a small Llama with random weights to FOLDER; it needs ckpt alone.

python small_llama.py FOLDER
"""

import sys

import torch

import ckpt

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
layout = ckpt.layout_for(CONFIG)
tensors = {name: 0.02 * torch.randn(block.shape) for name, block in layout.at(ckpt.Place()).items()}
ckpt.save_hf(sys.argv[1], tensors, layout)
