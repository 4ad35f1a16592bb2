"""Find the text backbone of a model, and its decoder layers."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


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
