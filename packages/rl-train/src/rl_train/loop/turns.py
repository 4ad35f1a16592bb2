"""Models that share devices and take turns on them: one is there, the others are on the host."""

from __future__ import annotations

from typing import Any

# Methods that need the model on the device -> whether they need the optimizer's state, too.
_NEEDS = {
    "log_probs": False,
    "values": False,
    "estimate": False,
    "rewards": False,
    "generate": False,
    "save_pretrained": False,
    "update": True,
    "save_training": True,
    "load_training": True,
}


class Turns:
    """Who is on the devices. A model comes when one of its methods is called, and goes when another's is."""

    def __init__(self) -> None:
        self._working: Any = None
        self._has_optimizer = False

    def add(self, model: Any) -> Any:
        """Send a model, with the methods of an actor or a critic, to the host; its methods then fetch it."""
        model.offload()
        return _Waiting(self, model)

    def begin(self, model: Any, *, optimizer: bool) -> None:
        """Make it this model's turn; its optimizer's state comes when it is first needed."""
        if self._working is not model:
            if self._working is not None:
                self._working.offload()
            self._working, self._has_optimizer = model, False
            model.onload(optimizer=False)
        if optimizer and not self._has_optimizer:
            model.onload(weights=False)
            self._has_optimizer = True


class _Waiting:
    """A model whose turn may come."""

    def __init__(self, turns: Turns, model: Any) -> None:
        self._turns, self._model = turns, model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name not in _NEEDS:
            return found

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            self._turns.begin(self._model, optimizer=_NEEDS[name])
            return found(*args, **kwargs)

        return in_turn
