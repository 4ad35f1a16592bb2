"""The states of the random-number generators, as JSON values."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def capture_rng() -> dict[str, Any]:
    """The states of torch's and Python's random-number generators, as JSON values."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to captured states."""
    torch.set_rng_state(_bytes(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def streams_to_json(streams: Mapping[str, Tensor]) -> dict[str, str]:
    """Named states of the caller's own generators, as JSON values.

    Raises:
        ValueError: one is no flat tensor of bytes, as `torch.Generator.get_state` gives it.
    """
    for name, stream in streams.items():
        if stream.dtype != torch.uint8 or stream.dim() != 1:
            raise ValueError(
                f"streams[{name!r}] is of type {stream.dtype} and shape {tuple(stream.shape)}; pass the states of "
                "generators, which are flat tensors of uint8"
            )
    return {name: _text(stream) for name, stream in streams.items()}


def streams_from_json(texts: Mapping[str, str]) -> dict[str, Tensor]:
    """The states that `streams_to_json` has written, on the CPU."""
    return {name: _bytes(text) for name, text in texts.items()}


def _text(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
