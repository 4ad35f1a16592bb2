"""`Rule`: an algorithm that changes some of a rank's master weights by their gradients."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import HAS_TRITON
from rl_models.engines.optimizers.moments import Parts, Storage
from rl_models.engines.optimizers.rounding import Coordinates

# The most elements that a step computes at a time in fp32, beside the stored moments.
_CHUNK = 1 << 24


class Rule(ABC):
    """An algorithm and the state of the master weights that it changes.

    Attributes:
        slots: The names of a parameter's state after a step.
    """

    slots: frozenset[str]

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Change the master weights by their `grad`, which this may overwrite."""

    @abstractmethod
    def state(self, master: Tensor) -> dict[str, Tensor]:
        """Return the state of a master weight by slot; empty before the first step."""

    @abstractmethod
    def load_state(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a master weight; an empty state is that before the first step."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the state."""


@dataclass
class Stored:
    """The steps of a master weight so far, and its moments by slot."""

    steps: int
    moments: dict[str, Parts]


class Chunk(NamedTuple):
    """Some rows of a master weight, seen as a matrix, and the keys of their random numbers."""

    start: int
    stop: int
    rows: Tensor
    columns: Tensor


class StoredRule(Rule):
    """A rule whose moments have a `Storage`.

    `squares` are the slots of moments, and whether their values are never negative.
    """

    def __init__(
        self, coordinates: Mapping[Tensor, Coordinates], storage: Storage, squares: Mapping[str, bool]
    ) -> None:
        self.coordinates, self.storage, self.squares = coordinates, storage, squares
        self.slots = frozenset(("step", *squares))
        self._stored: dict[Tensor, Stored] = {}

    def stored(self, master: Tensor) -> Stored:
        """Return the state of a master weight, zeros before its first step."""
        if master not in self._stored:
            rows, columns = map(len, self.coordinates[master])
            moments = {
                slot: self.storage.allocate(rows, columns, master.device, square)
                for slot, square in self.squares.items()
            }
            self._stored[master] = Stored(0, moments)
        return self._stored[master]

    def chunks(self, master: Tensor) -> Iterator[Chunk]:
        """Yield a master weight in chunks of rows."""
        rows, columns = self.coordinates[master]
        count = max(1, _CHUNK // max(1, len(columns)))
        for start in range(0, len(rows), count):
            own = rows[start : start + count]
            yield Chunk(start, start + len(own), own, columns)

    def as_matrix(self, master: Tensor, values: Tensor) -> Tensor:
        """Return values of a master weight's shape as a matrix, sharing their memory if they are contiguous."""
        return values.reshape(tuple(map(len, self.coordinates[master])))

    def state(self, master: Tensor) -> dict[str, Tensor]:
        """See `Rule`. Moments of 8 bits come as fp32 in host memory."""
        if master not in self._stored:
            return {}
        stored = self._stored[master]
        moments = {}
        for slot, parts in stored.moments.items():
            (first, *others) = parts
            values = torch.empty(first.shape, device="cpu") if others else first
            for chunk in self.chunks(master) if others else ():
                own = self.storage.part(parts, chunk.start, chunk.stop)
                values[chunk.start : chunk.stop].copy_(self.storage.read(own))
            moments[slot] = values.view(master.shape)
        return {"step": torch.tensor(float(stored.steps)), **moments}

    def load_state(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `Rule`."""
        self._stored.pop(master, None)
        if not state:
            return
        stored = self.stored(master)
        stored.steps = int(state["step"])
        for slot, parts in stored.moments.items():
            values = self.as_matrix(master, state[slot].detach())
            for chunk in self.chunks(master):
                own = values[chunk.start : chunk.stop].to(master.device, torch.float32)
                self.storage.write(self.storage.part(parts, chunk.start, chunk.stop), own)

    def tensors(self) -> Iterator[Tensor]:
        """See `Rule`."""
        for stored in self._stored.values():
            for parts in stored.moments.values():
                yield from parts


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that is compiled where its first argument is on a GPU with Triton."""
    fused: Callable[[], Callable[..., None]] = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def call(first: Tensor, *others: Any) -> None:
        (fused() if first.is_cuda and HAS_TRITON else function)(first, *others)

    return call
