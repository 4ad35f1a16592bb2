"""Named streams of random numbers, and recomputation that replays them.

In a tensor-parallel model some random numbers must differ between the ranks (dropout of each rank's own heads) and some
must agree (dropout of replicated hidden states). Each kind gets a stream of its own; `RngStates.fork` makes torch's
default generators continue a stream for the length of a `with` block.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.memory.recompute import checkpoint, recomputed

__all__ = ["RngStates", "checkpoint", "recomputed"]

# What torch's default generators do outside of any fork.
_DEFAULT = "default"
# The entry of a snapshot that names the stream that was being drawn from; the others are called "stream.device".
_ACTIVE = "active"


class RngStates:
    """Random number streams by name, for the CPU and, if given, one CUDA device.

    Args:
        device: The CUDA device whose generator the streams drive, besides the CPU's; None: the CPU's alone.

    `fork(name)` may be nested, also in itself: the inner block continues where the outer one stands, the outer one
    continues where the inner one has ended. No state is kept outside the object.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device) if device is not None and torch.device(device).type != "cpu" else None
        if self.device is not None and self.device.type != "cuda":
            raise ValueError(f"device={device!r} is neither a CPU nor a CUDA device")
        self._states: dict[str, tuple[Tensor, ...]] = {}
        # The streams that are being drawn from, innermost last; the state of the last one is torch's own.
        self._active = [_DEFAULT]

    @classmethod
    def tensor_parallel(
        cls, seed: int, group: ProcessGroup | None, device: torch.device | str | None = None
    ) -> RngStates:
        """Two streams: `"replicated"`, the same on all ranks of `group`, and `"sharded"`, another one on each rank.

        Ranks of different groups that should draw different numbers (data parallelism) pass different seeds.
        """
        states = cls(device)
        states.add("replicated", seed)
        states.add("sharded", _derived(seed, "sharded", 0 if group is None else group.rank()))
        return states

    @property
    def names(self) -> list[str]:
        """The streams, in the order in which they were added."""
        return [name for name in self._states if name != _DEFAULT]

    def add(self, name: str, seed: int) -> None:
        """Begin a stream from a seed.

        Raises:
            ValueError: There is a stream of that name, or the name is `"default"`, which torch's own state has here.
        """
        if name == _DEFAULT or name in self._states:
            raise ValueError(
                f"there is a stream {name!r} already; streams are {self.names}, and {_DEFAULT!r} is torch's"
            )
        self._states[name] = tuple(
            torch.Generator(device=generator.device).manual_seed(seed).get_state() for generator in self._generators()
        )

    @contextlib.contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw from the stream `name` inside the block; afterwards from what was drawn from before.

        Raises:
            ValueError: There is no such stream.
        """
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
        """A snapshot, all `uint8` tensors on the CPU: each stream's state, torch's own included, and the active one."""
        self._suspend()
        return {_ACTIVE: torch.tensor(list(self._active[-1].encode()), dtype=torch.uint8, device="cpu")} | {
            f"{name}.{generator.device.type}": state.clone()
            for name, states in self._states.items()
            for generator, state in zip(self._generators(), states, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Return to a snapshot; streams added since are forgotten. What is being drawn from is left to the forks.

        Raises:
            ValueError: The snapshot is of other devices, or lacks a stream that is being drawn from.
        """
        types = [generator.device.type for generator in self._generators()]
        names = list(dict.fromkeys(key.rpartition(".")[0] for key in state if key != _ACTIVE))
        needed = [_ACTIVE, *(f"{n}.{t}" for n in [*names, *self._active] for t in types)]
        missing = [key for key in needed if key not in state]
        if missing or len(state) != 1 + len(names) * len(types):
            raise ValueError(f"not a snapshot of streams on {types}: it holds {sorted(state)} and lacks {missing}")
        self._states = {name: tuple(state[f"{name}.{kind}"].clone() for kind in types) for name in names}
        self._resume()

    @contextlib.contextmanager
    def replay(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Draw inside the block as at the snapshot, from the same stream, and afterwards as if it had not been.

        Raises:
            ValueError: As `load_state_dict`.
        """
        now = self.state_dict()
        self.load_state_dict(state)
        self._active.append(bytes(state[_ACTIVE].tolist()).decode())
        self._resume()
        try:
            yield
        finally:
            self._active.pop()
            self.load_state_dict(now)

    def _generators(self) -> list[torch.Generator]:
        if self.device is None:
            return [torch.default_generator]
        torch.cuda.init()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return [torch.default_generator, torch.cuda.default_generators[index]]

    def _suspend(self) -> None:
        self._states[self._active[-1]] = tuple(generator.get_state() for generator in self._generators())

    def _resume(self) -> None:
        for generator, state in zip(self._generators(), self._states[self._active[-1]], strict=True):
            generator.set_state(state)


def _derived(seed: int, *key: object) -> int:
    """A seed that is unlike those of all other keys."""
    text = "/".join(map(str, (seed, *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
