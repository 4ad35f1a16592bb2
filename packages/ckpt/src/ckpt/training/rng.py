"""Turn the states of random-number generators into JSON values and back."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt.device import GPU, gpu


def capture_rng() -> dict[str, Any]:
    """Return the states of torch's and Python's random-number generators, as JSON values."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    if gpu.is_available():
        state[GPU] = _text(gpu.get_rng_state())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to captured states."""
    torch.set_rng_state(_bytes(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if GPU in state and gpu.is_available():
        gpu.set_rng_state(_bytes(state[GPU]))


def streams_to_json(streams: Mapping[str, Tensor]) -> dict[str, str]:
    """Return named states of the caller's own generators as JSON values.

    Raises:
        ValueError: A state is not a flat tensor of bytes, as `torch.Generator.get_state` returns.
    """
    for name, stream in streams.items():
        if not isinstance(stream, Tensor) or stream.dtype != torch.uint8 or stream.dim() != 1:
            is_tensor = isinstance(stream, Tensor)
            kind = f"{stream.dtype} and shape {tuple(stream.shape)}" if is_tensor else type(stream).__name__
            raise ValueError(
                f"streams[{name!r}] is of type {kind}; pass generator states, which are flat tensors of uint8, "
                "by generator.get_state()"
            )
    return {name: _text(stream) for name, stream in streams.items()}


def streams_from_json(texts: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the states in the output of `streams_to_json`, on the CPU."""
    return {name: _bytes(text) for name, text in texts.items()}


def state_of_rank(saved: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return the states of a rank of a resumed run, given the states of every rank of the saved run.

    A rank of the saved run gets its own states. Beyond the `n` saved ranks, rank `r` gets new states, derived from
    the states of rank `r % n` and from `r // n`, so ranks with equal states get equal new states. All ranks share a
    state that all saved ranks shared.

    Raises:
        ValueError: A state has a length that no generator of torch has, so no state can be derived.
    """
    index, turn = rank % len(saved), rank // len(saved)
    states = dict(saved[index])
    for name, state in states.items():
        if name == "streams":
            streams = [entry.get(name, {}) for entry in saved]
            states[name] = {key: _renewed(key, [held.get(key) for held in streams], index, turn) for key in state}
        else:
            states[name] = _renewed(name, [entry.get(name) for entry in saved], index, turn)
    return states


def _renewed(name: str, states: Sequence[Any], index: int, turn: int) -> Any:
    saved = states[index]
    if turn == 0 or all(state == saved for state in states):
        return saved
    digest = hashlib.sha256(f"{json.dumps(saved)} {turn}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    if isinstance(saved, list):
        version, numbers, gauss = random.Random(seed).getstate()
        return [version, list(numbers), gauss]
    on_cpu = _text(torch.Generator().manual_seed(seed).get_state())
    # A state on CUDA is a seed and an offset, 8 bytes each.
    on_gpu = seed.to_bytes(8, "little").hex() + "00" * 8
    for new in (on_cpu, on_gpu):
        if len(new) == len(saved):
            return new
    raise ValueError(
        f"the state {name!r} of {len(saved) // 2} bytes is of no generator of torch's, so none can be derived from it "
        f"for further ranks; load on at most {len(states)} ranks"
    )


def check_states(saved: Any) -> None:
    """Check the states of all ranks that were read from a file.

    Raises:
        ValueError: A state is not an output of `capture_rng` or `streams_to_json`; names the rank.
    """
    if not isinstance(saved, list) or not saved:
        raise ValueError("rng must be a list of one object for each rank")
    for rank, entry in enumerate(saved):
        try:
            for state in (entry["torch"], entry.get(GPU, ""), *entry.get("streams", {}).values()):
                bytes.fromhex(state)
            version, numbers, gauss = entry["python"]
            random.Random().setstate((version, tuple(numbers), gauss))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"rng[{rank}] holds no states of generators: {error!r:.200}") from None


def _text(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
