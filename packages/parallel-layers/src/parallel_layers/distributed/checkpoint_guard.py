"""Make sharded parameters in a `state_dict()` refuse `torch.distributed.checkpoint`.

torch takes plain tensors of several ranks for copies of one tensor and writes one of them, so it would keep one rank's
shard of each parameter. `TrainingState` saves and loads all shards.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import Tensor, nn

_METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def guard_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Mark the tensors of the sharded parameters of `module`; a hook for `register_state_dict_post_hook`."""
    for name, shardings in module.__dict__["_shardings"].items():
        tensor = state_dict.get(prefix + name)
        # With `keep_vars=True` the state dict holds the parameter itself, which must stay unmarked.
        if not isinstance(tensor, Tensor) or tensor is getattr(module, name, None):
            continue
        if any(sharding.group is not None and sharding.group.size() > 1 for sharding in shardings):
            for method in _METHODS:
                setattr(tensor, method, _refuse)
            tensor.__getstate__ = _StateWithoutGuard(tensor)  # type: ignore[method-assign]


def _refuse(*_: object) -> NoReturn:
    raise ValueError(
        "torch.distributed.checkpoint was given a parameter that is sharded over a tensor- or expert-parallel group, "
        "and would keep one rank's shard; save and load {'app': parallel_layers.TrainingState(model, optimizer)} "
        "instead of the state dicts"
    )


class _StateWithoutGuard:
    """Pickle a marked tensor without its mark; the reference is weak because the tensor holds this object."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __call__(self) -> Any:
        tensor = self._tensor()
        state = None if tensor is None else type(tensor).__getstate__(tensor)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        kept = {key: value for key, value in (attributes or {}).items() if key not in (*_METHODS, "__getstate__")}
        return (kept or None, slots) if slots else kept or None

    def __deepcopy__(self, memo: object) -> _StateWithoutGuard:
        return self
