"""Named streams of random numbers.

In a tensor-parallel model some random numbers must differ between the ranks (dropout of sharded heads) and some must
agree (dropout of replicated hidden states). Each kind has its own stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import gpu
from parallel_layers.device.names import GPU
from parallel_layers.module.seeds import hashed_seed

# The stream of torch's default generators outside of any fork.
_DEFAULT = "default"
# The entry of a snapshot that names the active stream; the other entries are states, by "stream.device".
_ACTIVE = "active"


class RngStates:
    """Random number streams by name, for the CPU and, if `device` is one, a CUDA device.

    `fork(name)` makes torch's default generators continue a stream inside a `with` block. Blocks may be nested, also
    blocks of the same stream. All state is in this object.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device) if device is not None and torch.device(device).type != "cpu" else None
        if self.device is not None and self.device.type != GPU:
            raise ValueError(f"device={device!r} must be a CPU or a CUDA device")
        self._states: dict[str, Tensor] = {}
        # The streams of the open forks, innermost last. torch's generators hold the state of the last stream.
        self._active = [_DEFAULT]

    @classmethod
    def tensor_parallel(
        cls, seed: int, group: ProcessGroup | None, device: torch.device | str | None = None
    ) -> RngStates:
        """Return two streams: `"replicated"`, equal on all ranks of `group`, and `"sharded"`, different on each rank.

        Pass different seeds on groups that should draw different numbers (data parallelism).
        """
        states = cls(device)
        states.add("replicated", seed)
        rank = 0 if group is None else group.rank()
        states.add("sharded", hashed_seed(seed, "sharded", rank, size=7))
        return states

    @property
    def names(self) -> list[str]:
        """The names of the streams in the order in which they were added."""
        return [name for name in dict.fromkeys(key.rpartition(".")[0] for key in self._states) if name != _DEFAULT]

    def add(self, name: str, seed: int) -> None:
        """Start a stream from a seed; raise ValueError if the name is taken, or is torch's own, `"default"`."""
        if name in (_DEFAULT, *self.names):
            raise ValueError(
                f"there is a stream {name!r} already; streams are {self.names}, and {_DEFAULT!r} is torch's"
            )
        for kind, generator in self._generators().items():
            self._states[f"{name}.{kind}"] = torch.Generator(device=generator.device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw from the stream `name` inside the block, and from the former stream afterwards."""
        if name not in self.names:
            raise ValueError(f"no stream {name!r}; streams are {self.names}")
        self._suspend()
        self._active.append(name)
        self._resume()
        try:
            yield
        finally:
            self._suspend()
            self._active.pop()
            self._resume()

    def state_dict(self) -> dict[str, Tensor]:
        """Return a snapshot of all streams, of torch's own state, and of the active stream: `uint8` CPU tensors."""
        self._suspend()
        active = torch.tensor(list(self._active[-1].encode()), dtype=torch.uint8, device="cpu")
        return {_ACTIVE: active} | {key: state.clone() for key, state in self._states.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Return to a snapshot; later streams are removed. Open forks stay open.

        Raises:
            ValueError: The snapshot is of other devices, or lacks the stream of an open fork.
        """
        kinds = list(self._generators())
        names = {key.rpartition(".")[0] for key in state if key != _ACTIVE}.union(self._active)
        needed = {_ACTIVE, *(f"{name}.{kind}" for name in names for kind in kinds)}
        if state.keys() != needed:
            missing = sorted(needed - state.keys())
            raise ValueError(f"not a snapshot of streams on {kinds}: it holds {sorted(state)} and lacks {missing}")
        self._states = {key: value.clone() for key, value in state.items() if key != _ACTIVE}
        self._resume()

    @contextlib.contextmanager
    def replay(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Draw inside the block as at the snapshot; afterwards go on as if the block had not run."""
        current = self.state_dict()
        self.load_state_dict(state)
        self._active.append(bytes(state[_ACTIVE].tolist()).decode())
        self._resume()
        try:
            yield
        finally:
            self._active.pop()
            self.load_state_dict(current)

    def _generators(self) -> dict[str, torch.Generator]:
        if self.device is None:
            return {"cpu": torch.default_generator}
        gpu.init()
        index = gpu.current_device() if self.device.index is None else self.device.index
        return {"cpu": torch.default_generator, GPU: gpu.default_generators[index]}

    def _suspend(self) -> None:
        for kind, generator in self._generators().items():
            self._states[f"{self._active[-1]}.{kind}"] = generator.get_state()

    def _resume(self) -> None:
        for kind, generator in self._generators().items():
            generator.set_state(self._states[f"{self._active[-1]}.{kind}"])
