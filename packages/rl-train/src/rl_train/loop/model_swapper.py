"""`ModelSwapper`: keep one model on the devices and the others in host memory."""

from __future__ import annotations

from typing import Any

from rl_models.api import ModelCalls
from rl_models.calls import methods_of


class ModelSwapper:
    """Keep one model on the devices and offload the others.

    A method that needs the devices (`rl_models.calls.dispatch.Method.needs`) brings its model there first.
    """

    def __init__(self) -> None:
        self._working: ModelCalls | None = None
        self._has_optimizer = False

    def add(self, model: ModelCalls) -> ModelCalls:
        """Offload an actor or a critic, and return calls that bring the model to the devices first."""
        model.offload()
        return _SwappedModel(self, model)

    def begin(self, model: ModelCalls, *, optimizer: bool) -> None:
        """Offload the model that works, and bring `model` to the devices, on request with its optimizer state."""
        if self._working is not model:
            if self._working is not None:
                self._working.offload()
            self._working, self._has_optimizer = model, False
            model.onload(optimizer=False)
        if optimizer and not self._has_optimizer:
            model.onload(weights=False)
            self._has_optimizer = True


class _SwappedModel(ModelCalls):
    """The calls of a model that is offloaded until one of its methods is called."""

    def __init__(self, swapper: ModelSwapper, model: ModelCalls) -> None:
        self._swapper, self._model, self.worker_class, self.grid = swapper, model, model.worker_class, model.grid

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Bring the model to the devices if the method needs them, and call it."""
        declared = methods_of(self.worker_class).get(method)
        if declared is not None and declared.needs != "nothing":
            self._swapper.begin(self._model, optimizer=declared.needs == "optimizer")
        return self._model.call(method, *args, **kwargs)
