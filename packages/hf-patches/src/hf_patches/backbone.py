"""Find the text backbone of a model, its decoder layers, and the device of the computation."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

# The types of layers that have no attention and no recurrence (Nemotron-H).
WITHOUT_TOKEN_MIXER = ("mlp", "moe")


def find_backbone(model: PreTrainedModel) -> nn.Module:
    """Return the text backbone: the transformers model that owns the input embedding."""
    embedding = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(child is embedding for child in module.children()):
            return module
    raise ValueError(f"{type(model).__name__} has no submodule that owns its input embedding, so no text backbone")


def decoder_layers(backbone: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers of a text backbone.

    Raises:
        ValueError: The backbone has no list of `config.num_hidden_layers` modules.
    """
    config: Any = backbone.config
    for child in backbone.children():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return child
    raise ValueError(f"{type(backbone).__name__} has no list of its {config.num_hidden_layers} decoder layers")


def num_token_mixers(config: Any) -> int:
    """Return the number of decoder layers that have attention or a recurrence."""
    types = getattr(config, "layer_types", None) or ()
    return int(config.num_hidden_layers) - sum(kind in WITHOUT_TOKEN_MIXER for kind in types)


def compute_device(module: nn.Module) -> torch.device:
    """Return the device of the computation, also if FSDP2 keeps the parameters elsewhere."""
    parameter = next(module.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
