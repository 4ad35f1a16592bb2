"""Views of a model."""

import gc
import weakref

from torch import nn

from parallel_layers.module import view_of


def test_a_view_is_freed_with_its_last_reference() -> None:
    """A view can hold gathered experts or FP8 copies, which must not wait for a garbage collection."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    gc.disable()
    try:
        view = view_of(model, lambda _, copy: None)
        modules = [weakref.ref(module) for module in view.modules()]
        del view
        assert [module() for module in modules] == [None] * 4
    finally:
        gc.enable()
