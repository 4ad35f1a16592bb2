"""torch's module for the devices that GPU code runs on, and what it names differently than other modules.

`torch.accelerator` of torch 2.11 has no graphs, times of events, allocator's pools or random states, so the code calls
the module of the type. Other types of torch, such as xpu, have modules with the same functions.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

# Devices, streams, events, memory and random states.
gpu = torch.cuda
Graph = torch.cuda.CUDAGraph


def pin(memory: Tensor) -> None:
    """Pin host memory in place, until the tensor ends."""
    runtime = gpu.cudart()
    gpu.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    # At exit the driver has gone and has released its locks.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False


def on_gpu(tensor: Tensor) -> bool:
    """Say whether a tensor is on a GPU."""
    return tensor.is_cuda
