"""Tensors that a model carries and does not compute, such as the vision tower of a model of text alone."""

from __future__ import annotations

import torch
from torch import nn

import ckpt


def carry(model: nn.Module, layout: ckpt.Layout, checkpoint: ckpt.Checkpoint, device: torch.device | str) -> None:
    """Add the carried tensors of a layout to the model of the first stage, as buffers with the dtypes of the files."""
    stored = checkpoint.tensors
    for name, shape in layout.carried.items():
        spelled = next(spelling for spelling in layout.family.file_names(name) if spelling in stored)
        *parents, last = name.split(".")
        owner = model
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.register_buffer(last, torch.empty(shape, dtype=stored[spelled][1].dtype, device=device))
