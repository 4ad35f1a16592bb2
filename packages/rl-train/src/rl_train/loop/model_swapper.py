"""`ModelSwapper`: keep one model on the devices and the others in host memory."""

from __future__ import annotations

from typing import Any

from rl_models.calls import methods_of


class ModelSwapper:
    """Keep one model on the devices and offload the others.

    A method that needs the devices (`rl_models.calls.dispatch.Method.needs`) brings its model there first.
    """

    def __init__(self) -> None:
        self._working: Any = None
        self._has_optimizer = False

    def add(self, model: Any) -> Any:
        """Offload an actor or a critic, and return a proxy whose methods bring the model to the devices first."""
        model.offload()
        return _SwappedModel(self, model)

    def begin(self, model: Any, *, optimizer: bool) -> None:
        """Offload the model that works, and bring `model` to the devices, on request with its optimizer state."""
        if self._working is not model:
            if self._working is not None:
                self._working.offload()
            self._working, self._has_optimizer = model, False
            model.onload(optimizer=False)
        if optimizer and not self._has_optimizer:
            model.onload(weights=False)
            self._has_optimizer = True


class _SwappedModel:
    """A proxy of a model that is offloaded until one of its methods is called."""

    def __init__(self, swapper: ModelSwapper, model: Any) -> None:
        self._swapper, self._model = swapper, model

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._model, name)
        method = methods_of(getattr(self._model, "kind", type(self._model))).get(name)
        if method is None or method.needs == "nothing":
            return attribute

        def swap_then_call(*args: Any, **kwargs: Any) -> Any:
            self._swapper.begin(self._model, optimizer=method.needs == "optimizer")
            return attribute(*args, **kwargs)

        return swap_then_call
