"""Save a training run of a checkpoint, load it again, and compare every number.

python resume_ckpt.py CHECKPOINT RUN
"""

import sys

import torch

import ckpt

source, run = sys.argv[1:]
layout = ckpt.layout_for(source)
weights = ckpt.load_hf(source, layout)
moments = {name: {"exp_avg": tensor / 2} for name, tensor in weights.items()}
ckpt.save_training(run, 3, weights, layout, optimizer=moments, extra={"seen": 7})
state = ckpt.load_training(run, layout, check=True)
assert (state.step, state.extra) == (3, {"seen": 7})
torch.testing.assert_close(state.tensors, weights, rtol=0, atol=0)
torch.testing.assert_close(state.optimizer, moments, rtol=0, atol=0)
