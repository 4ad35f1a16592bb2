"""Share a frozen base among several models: the second model's parameters are the tensors of the first model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

import ckpt
from ckpt.layout import HEADS
from ckpt.transfer import load_blocks
from parallel_models.engine.grid import Grid
from parallel_models.training.fsdp import release


def require_base(model: nn.Module, base: nn.Module) -> None:
    """Raise ValueError unless `base` holds every frozen tensor of a model."""
    base_tensors = _tensors(base)
    missing = [name for name, _, _, tensor in _slots(model) if not _trains(name, tensor) and name not in base_tensors]
    if missing:
        raise ValueError(
            f"the base lacks {missing[0]} ({len(missing)} tensors in all); load the model that has the most heads "
            "first, an Actor or an ActorCritic, and share its base with the others"
        )


def share_base_(model: nn.Module, base: nn.Module) -> None:
    """Replace each frozen tensor of a model by the tensor of `base` with the same name.

    Both models are sharded alike; FSDP2 takes a replaced parameter at the first forward.
    """
    release(base)
    base_tensors = _tensors(base)
    for name, module, key, tensor in list(_slots(model)):
        if not _trains(name, tensor):
            slots = module._parameters if key in module._parameters else module._buffers
            slots[key] = base_tensors[name]  # type: ignore[assignment]


def load_heads(
    checkpoint: ckpt.Checkpoint,
    layout: ckpt.Layout,
    places: Sequence[ckpt.Place],
    tensors: Mapping[str, Tensor],
    grid: Grid,
) -> None:
    """Read the value head among a model's tensors, by local name, if the checkpoint has one."""
    stored_heads = checkpoint.tensors.keys() & set(HEADS)
    heads = {
        name: block
        for place in places
        for name, block in layout.at(place).items()
        if name in tensors and block.names and stored_heads.issuperset(block.names)
    }
    load_blocks(checkpoint, heads, {name: tensors[name].detach() for name in heads}, group=grid.everyone)


def _slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the tensors of a state dict: name in a checkpoint, owner, the owner's name, tensor."""
    for path, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        for key, tensor in tensors.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield _plain(f"{path}.{key}" if path else key), module, key, tensor


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen tensors of a model; heads of different models may have one name."""
    return {name: tensor for name, _, _, tensor in _slots(model) if not _trains(name, tensor)}


def _trains(name: str, tensor: Tensor) -> bool:
    """Say whether a tensor is of an adapter or of a value head, which each model has for itself."""
    return tensor.requires_grad or name in HEADS


def _plain(name: str) -> str:
    """Return the name of a tensor without the layer that PEFT puts around a linear."""
    return name.replace(".base_layer.", ".")
