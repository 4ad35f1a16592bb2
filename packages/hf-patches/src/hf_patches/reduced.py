"""A small copy of one model for a proof at the start: a few layers of its real shapes, with random fp32 weights.

The copy is made of the modules of the model itself, so it needs neither files nor a second config. It keeps the first
two layers and the first layer of every kind. Kinds differ in classes, shapes or plain attributes (a window, a switch of
the rotation). Windows, chunks and counts of chosen keys are a few tokens wide in the copy, so that short sequences
reach beyond them.
"""

import copy
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_patches.backbone import decoder_layers, find_backbone
from hf_patches.proofs import normal

# The width of windows in the copy, and the rows of embedding and head.
_WINDOW, _VOCABULARY = 4, 1024
_WINDOW_NAME = re.compile(r"(window|chunk|block)(_size)?$|^local_attention$|^index_topk")
_NUMBER_NAME = re.compile(r"(^|_)(idx|index|layer_id)$")


def reduced_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy on the CPU in evaluation mode, with eager attention.

    Matrices are random with deviation 1 / sqrt(columns), vectors near 1. Buffers keep their values; buffers of a
    checkpoint that is not loaded yet are random as well.

    Raises:
        ValueError: Buffers that no checkpoint has are on the meta device, the decoder layers are not in a list, or the
            host has too little memory for the copy and its gradients.
    """
    stored = model.state_dict(keep_vars=True)
    unloaded = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    if missing := [name for name, buffer in unloaded.items() if name not in stored or not buffer.is_floating_point()]:
        raise ValueError(f"{', '.join(missing[:3])} have no values yet (meta device); load the model first")
    layers = decoder_layers(find_backbone(model))
    kinds = [_kind(layer) for layer in layers]
    numbers = sorted({0, min(1, len(layers) - 1), *(kinds.index(kind) for kind in kinds)})
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = min(vocabulary, _VOCABULARY)
    # deepcopy takes the entry under an object's id as the copy of the object.
    copies: dict[int, Any] = {id(layer): nn.Identity() for i, layer in enumerate(layers) if i not in numbers}
    dropped = {id(x) for layer in layers if id(layer) in copies for x in layer.parameters()}
    dropped -= {id(x) for number in numbers for x in layers[number].parameters()}
    shapes = {
        parameter: [rows if size == vocabulary else size for size in parameter.shape]
        for parameter in model.parameters()
        if id(parameter) not in dropped
    }
    _require_memory(sum(map(math.prod, shapes.values())), len(numbers))
    for parameter, shape in shapes.items():
        empty = torch.empty(shape, dtype=torch.float32, device="cpu")
        copies[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    copies |= {id(buffer): torch.empty_like(buffer, device="cpu") for buffer in unloaded.values()}
    small = copy.deepcopy(model, copies).cpu().float().eval()
    _keep(copies[id(layers)], numbers)
    _edit(small, len(layers), numbers, rows)
    _fill([*small.parameters(), *(small.get_buffer(name) for name in unloaded if name in small.state_dict())])
    return small


def _require_memory(parameters: int, layers: int) -> None:
    """Raise ValueError if the host has no memory for fp32 weights and two sets of gradients; Linux tells how much."""
    needed, available = 12 * parameters, available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"the proof on a copy with {layers} layers needs {needed / 1e9:.1f} GB of memory on the CPU, and "
            f"{available / 1e9:.1f} GB are free; free some, or load fewer models at a time on this host"
        )


def available_memory() -> int | None:
    """Return the free bytes of the host's memory, or None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    match = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())
    return None if match is None else int(match[1]) * 1024


def _kind(layer: nn.Module) -> str:
    """Describe everything in a layer except its number and the values of its tensors."""
    descriptions = []
    for name, module in layer.named_modules():
        tensors = [
            (key, x.shape) for key, x in (*module._parameters.items(), *module._buffers.items()) if x is not None
        ]
        plain = [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | tuple | None) and not _NUMBER_NAME.search(key)
        ]
        descriptions.append(f"{name} {type(module).__qualname__} {tensors} {plain}")
    return "\n".join(descriptions)


def _keep(layers: nn.ModuleList, numbers: list[int]) -> None:
    """Drop the other layers, and renumber the kept layers by their new places, because caches use these numbers."""
    modules = [layers[number] for number in numbers]
    layers._modules.clear()
    for position, (number, layer) in enumerate(zip(numbers, modules, strict=True)):
        layers.append(layer)
        for module in layer.modules():
            for key, value in vars(module).items():
                if _NUMBER_NAME.search(key) and value == number:
                    module.__dict__[key] = position


def _edit(small: PreTrainedModel, num_layers: int, numbers: list[int], vocabulary: int) -> None:
    """Fit configs, windows and padding to the copy; lists with an entry per layer lose the dropped layers."""
    owners: dict[int, Any] = {id(module): module for module in small.modules()}
    configs = [module.config for module in small.modules() if isinstance(vars(module).get("config"), PreTrainedConfig)]
    owners |= {id(config): config for config in configs}
    for owner in owners.values():
        for key, value in vars(owner).items():
            if isinstance(value, int) and _WINDOW_NAME.search(key) and value > _WINDOW:
                owner.__dict__[key] = _WINDOW
            elif isinstance(value, list) and isinstance(owner, PreTrainedConfig) and len(value) == num_layers:
                owner.__dict__[key] = [value[number] for number in numbers]
        if isinstance(owner, PreTrainedConfig):
            owner.num_hidden_layers, owner.vocab_size = len(numbers), vocabulary
            owner._attn_implementation = "eager"
        elif isinstance(owner, nn.Embedding) and (owner.padding_idx or 0) >= vocabulary:
            owner.padding_idx = None


def _fill(tensors: Iterable[Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            noise = normal(tuple(tensor.shape), generator)
            tensor.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 1 + 0.1 * noise)
