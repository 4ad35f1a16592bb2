"""The states of the random-number generators, as JSON values."""

import random
from collections.abc import Mapping
from typing import Any

import torch


def capture_rng() -> dict[str, Any]:
    """The states of torch's and Python's random-number generators, as JSON values."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to captured states."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
