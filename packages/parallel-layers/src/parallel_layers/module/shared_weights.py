"""Views of a model, which share its parameters and replace the code of some modules."""

from collections.abc import Callable
from typing import TypeVar, cast

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def view_of(model: Model, change: Callable[[nn.Module, nn.Module], None]) -> Model:
    """Return a model of shallow copies of all modules of `model`.

    The view shares parameters, buffers and hooks with `model`, also after later changes (an optimizer step, loading,
    FSDP2's gathering); `model` stays unchanged. References other than parent-child still point to the original.

    `change` is called with each module and its copy; it gives the copy another class, or adds a `forward` or attributes
    to the copy's `__dict__`. A view can hold memory of its own, which its last reference frees: bind a `forward` to a
    `shallow_copy`, because a module that refers to itself stays until a garbage collection. Such a `forward` does not
    see attributes that the module gets later; methods of a class do.
    """
    return cast(Model, _view(model, change, {}))


def _view(
    module: nn.Module, change: Callable[[nn.Module, nn.Module], None], views: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return the view of a module; no closure, because one that calls itself refers to itself."""
    if module not in views:  # else a child of several modules
        copy = views[module] = shallow_copy(module)
        children = module._modules.items()
        copy.__dict__["_modules"] = {
            name: None if child is None else _view(child, change, views) for name, child in children
        }
        change(module, copy)
    return views[module]


def shallow_copy(module: Model) -> Model:
    """Return a copy that shares the dicts of parameters, buffers, hooks and children."""
    # object.__new__, because the __new__ of a module sharded by FSDP2 makes an instance of the original class.
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)  # not by __setattr__, which would copy the dicts
    return copy
