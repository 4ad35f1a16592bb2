"""Replacing what one module computes: its whole `forward`, or one function that its `forward` calls by name."""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

ROTATE = "apply_rotary_pos_emb"
"""The name under which transformers' attention calls the rotation of its queries and keys."""


@dataclass(frozen=True)
class Swap:
    """One replacement of a module's `forward`."""

    module: nn.Module
    forward: Callable[..., Any]
    what: str


def called_names(module: nn.Module) -> tuple[str, ...]:
    """The globals and attributes that the code of a module's `forward` names."""
    forward = type(module).forward
    return forward.__code__.co_names if isinstance(forward, FunctionType) else ()


def own_function(module: nn.Module, name: str) -> Callable[..., Any]:
    """The global function that the code of a module's `forward` calls `name`."""
    function: Callable[..., Any] = type(module).forward.__globals__[name]
    return function


def rebound(module: nn.Module, name: str, function: Callable[..., Any]) -> MethodType:
    """The module's `forward`, calling `function` where its code calls `name`.

    A global of the model's file is shared by all models of the family. So the code of `forward` is bound to this
    instance over a copy of those globals in which only the one name differs; and they have no `__name__`, by which
    torch.compile would look globals up in the file itself.
    """
    forward = type(module).forward
    copied_globals = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
    copied = FunctionType(
        forward.__code__,
        copied_globals | {name: function},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)
