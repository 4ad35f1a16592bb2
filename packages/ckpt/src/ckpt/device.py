"""The type of GPUs, and torch's module for it."""

import torch

GPU = "cuda"
gpu = torch.cuda
