"""`ModelSwapper`: keep one model on the devices and the others in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
        return AnnouncedCalls(model, partial(self._begin, model))

    def _begin(self, model: ModelCalls, method: str, _: tuple[Any, ...]) -> None:
        """Bring a model to the devices if one of its methods needs them, in place of the model that works."""
        declared = methods_of(model.worker_class).get(method)
        if declared is None or declared.needs == "nothing":
            return
        if self._working is not model:
            if self._working is not None:
                self._working.offload()
            self._working, self._has_optimizer = model, False
            model.onload(optimizer=False)
        if declared.needs == "optimizer" and not self._has_optimizer:
            model.onload(weights=False)
            self._has_optimizer = True


class AnnouncedCalls(ModelCalls):
    """The calls of a model; before each one, `announce` is called with the method and its positional arguments."""

    def __init__(self, model: ModelCalls, announce: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._model, self._announce, self.worker_class, self.grid = model, announce, model.worker_class, model.grid

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Announce a call, and call the model."""
        self._announce(method, args)
        return self._model.call(method, *args, **kwargs)
