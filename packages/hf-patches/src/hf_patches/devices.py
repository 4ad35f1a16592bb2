"""The device of a model's computation."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def compute_device(module: nn.Module) -> torch.device:
    """Return the device of the computation, also if FSDP2 keeps the parameters elsewhere."""
    parameter = next(module.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
