"""Views of a model: the same parameters, other code in some of its modules."""

from collections.abc import Callable
from typing import TypeVar, cast

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def view_of(model: Model, change: Callable[[nn.Module, nn.Module], None]) -> Model:
    """A shallow copy of every module of `model`, put together as `model` is.

    Parameters, buffers and hooks are the very ones of `model`, also those that it gets later (an optimizer's step,
    loading, FSDP2's gathering); `model` is not changed. A module that refers to another one by more than being its
    parent still refers to the one of `model`.

    Args:
        model: Any module.
        change: Called with each module and its copy, to whose `__dict__` it adds what is to be different: a `forward`,
            or attributes.

    Returns:
        The copy of `model`.
    """
    return cast(Model, _view(model, change, {}))


def _view(
    module: nn.Module, change: Callable[[nn.Module, nn.Module], None], views: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in views:  # a child of several modules
        return views[module]
    # Not the class's own __new__: that of a module that FSDP2 shards makes a new one of the class before.
    view = views[module] = object.__new__(type(module))
    # Around __setattr__: the dicts of parameters, buffers and hooks are to stay shared.
    view.__dict__.update(module.__dict__)
    view.__dict__["_modules"] = {
        name: None if child is None else _view(child, change, views) for name, child in module._modules.items()
    }
    change(module, view)
    return view
