"""Replace the computation of one module: its whole `forward`, or functions that its `forward` calls by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

ROTATE = "apply_rotary_pos_emb"
"""The name under which transformers' attention calls the rotation of its queries and keys."""


@dataclass(frozen=True)
class Swap:
    """A replacement of a module's `forward`."""

    module: nn.Module
    forward: Callable[..., Any]
    what: str


def called_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of a module's `forward`."""
    forward = _own_forward(module)
    return forward.__code__.co_names if isinstance(forward, FunctionType) else ()


def _own_forward(module: nn.Module) -> Any:
    """Return the `forward` of a module's class, without transformers' wrappers around it (old keywords, accelerate)."""
    return inspect.unwrap(type(module).forward)


def own_function(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the global function `name` of the code of a module's `forward`."""
    function: Callable[..., Any] = _own_forward(module).__globals__[name]
    return function


def rebound(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> MethodType:
    """Return the module's `forward`, which calls other functions where its code calls their names.

    All models of the family share the globals of the model's file. So the code of `forward` is bound to this instance
    over a copy of the globals with changed names. The copy has no `__name__`, because torch.compile would use it to
    look globals up in the file.
    """
    forward = _own_forward(module)
    copied_globals = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
    copied = FunctionType(
        forward.__code__,
        copied_globals | dict(functions),
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)
