"""Make sharded parameters in a `state_dict()` refuse `torch.distributed.checkpoint`.

torch takes plain tensors of several ranks for copies of one tensor and writes one of them, so it would keep one rank's
shard of each parameter. `TrainingState` saves and loads all shards. An optimizer's state dict alone has no guard.
"""

from __future__ import annotations

import copy
import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions


def guard_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Guard the tensors of the sharded parameters of `module`; a hook for `register_state_dict_post_hook`."""
    for name, shardings in module.__dict__["_shardings"].items():
        tensor = state_dict.get(prefix + name)
        # With `keep_vars=True` the state dict holds the parameter itself, which must stay as it is.
        if not isinstance(tensor, Tensor) or tensor is getattr(module, name, None):
            continue
        if any(sharding.group is not None and sharding.group.size() > 1 for sharding in shardings):
            state_dict[prefix + name] = _guarded(tensor)


def unguard_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Load tensors without a guard, as they may become parameters; a hook for `register_load_state_dict_pre_hook`."""
    for name in module.__dict__["_shardings"]:
        if prefix + name in state_dict:
            state_dict[prefix + name] = unguarded(state_dict[prefix + name])


def unguarded(tensor: Any) -> Any:
    """Return an alias of a guarded tensor without the guard, anything else as it is."""
    return _alias(tensor) if isinstance(tensor, _Guard) else tensor


class _Guard:
    """A tensor that `torch.distributed.checkpoint` refuses, as it does copies in another dtype or on another device."""

    __slots__ = ()
    shape: torch.Size

    def _refuse(self, *_: object) -> NoReturn:
        # dcp.load would replace a ValueError by its own error, which does not name the remedy.
        raise RuntimeError(
            "torch.distributed.checkpoint was given a parameter that is sharded over a tensor- or expert-parallel "
            "group, and would keep one rank's shard; save and load "
            "{'app': parallel_layers.training.TrainingState(model, optimizer)} instead of the state dicts"
        )

    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Guard a result that has the shape of a guarded argument; a result of another shape may be a full tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not isinstance(result, Tensor) or isinstance(result, _Guard) or func in _KEEP_RESULT:
                return result
            if func is Tensor.copy_ and type(result) is Tensor:
                result.__class__ = _guarded_class(Tensor)  # a copy in memory that was there before, for instance pinned
                return result
            shapes = [x.shape for x in (*args, *(kwargs or {}).values()) if isinstance(x, _Guard)]
            # torch's asynchronous save fills an empty tensor of another shape.
            return _guarded(result) if result.shape in shapes or func is Tensor.new_empty else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _guarded(copy.deepcopy(_alias(self), memo)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _alias(self).__reduce_ex__(protocol)


_KEEP_RESULT = {*get_default_nowrap_functions(), Tensor.as_subclass}


def _alias(tensor: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.alias(tensor)


def _guarded(tensor: Tensor) -> Tensor:
    """Return a guarded alias of `tensor`."""
    alias: Tensor = _alias(tensor)
    alias.__class__ = _guarded_class(type(alias))
    return alias


@functools.cache
def _guarded_class(kind: type[Tensor]) -> type[Tensor]:
    """Return the guarded subclass of a tensor class; DTensor's methods that bypass `__torch_function__` guard, too."""

    def guarding(method: Any) -> Any:
        return lambda *args, **kwargs: _guarded(method(*args, **kwargs))

    bypassing = [name for name in ("redistribute", "to_local", "full_tensor") if hasattr(kind, name)]
    methods = {name: guarding(getattr(kind, name)) for name in bypassing}
    guarded = type(f"Guarded{kind.__name__}", (_Guard, kind), {"__slots__": (), **methods})
    # The guard is sent to a process that saves in the background, but not written to a file.
    ForkingPickler.register(guarded, lambda tensor: (_guarded, (_alias(tensor),)))
    return guarded
