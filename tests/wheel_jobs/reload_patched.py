"""Save a patched model to FOLDER, load it, and compare log-probs.

python reload_patched.py FOLDER
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_patches import patch
from parallel_layers import PackedSequence

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
packed = PackedSequence.from_sequences([torch.arange(11), torch.arange(3)])
patch(model)
model.save_pretrained(sys.argv[1])
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
patch(loaded)
torch.testing.assert_close(loaded(packed=packed).log_probs, model(packed=packed).log_probs)
