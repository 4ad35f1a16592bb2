"""`Rule`: an algorithm that changes some of a rank's master weights by their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.memory import StreamedTensors
from parallel_models.optimizers.moments import MomentTensors, Storage
from parallel_models.optimizers.rounding import Coordinates

# Maximum number of elements of a bucket that passes through the device, and of a chunk that torch computes in fp32
# beside stored moments.
BUCKET = 1 << 23
CHUNK = 1 << 24


class Weight(NamedTuple):
    """The gradient of a master weight, contiguous, and the low-precision parameter that is its copy, on the device.

    `gradient` None: the weight has no gradient. `copy` None: an fp32 parameter is its own master weight.
    """

    gradient: Tensor | None
    copy: Tensor | None


class Chunk(NamedTuple):
    """The rows `start` to `stop - 1` of a master weight, seen as a matrix, on the device."""

    master: Tensor
    start: int
    stop: int
    values: Tensor
    moments: dict[str, MomentTensors]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a contiguous tensor of the master's shape, as a view."""
        columns = self.values.shape[1]
        return tensor.view(tensor.numel() // max(1, columns), columns)[self.start : self.stop]


class Rule(ABC):
    """An algorithm, and the moments of the master weights that it changes.

    Args:
        masters: The master weights.
        storages: The storage of each slot of the state; all are exact or none is.
        coordinates: The places of the masters' elements, where stochastic rounding needs them. A master without
            coordinates is a matrix of one column.
        host: Where moments and masters lie that pass through the device; None: all are on the device.
    """

    def __init__(
        self,
        masters: Iterable[Tensor],
        storages: Mapping[str, Storage],
        coordinates: Mapping[Tensor, Coordinates],
        host: StreamedTensors | None,
    ) -> None:
        self.masters, self.storages, self.coordinates, self.host = list(masters), storages, coordinates, host
        self.exact = all(storage.exact for storage in storages.values())
        self.slots = frozenset(("step", *storages))
        self.steps = dict.fromkeys(self.masters, 0)
        self._moments: dict[Tensor, dict[str, MomentTensors]] = {}

    @abstractmethod
    def step(self, learning_rate: float, weights: Mapping[Tensor, Weight]) -> None:
        """Change the master weights and their copies by the gradients, which this may overwrite."""

    def shape(self, master: Tensor) -> tuple[int, int]:
        """Return the rows and columns of a master weight as a matrix."""
        if master not in self.coordinates:
            return master.numel(), 1
        rows, columns = map(len, self.coordinates[master])
        return rows, columns

    def visit(
        self, masters: Iterable[Tensor], *, at_once: int | None = CHUNK, moments: bool = True, changes: bool = True
    ) -> Iterator[list[Chunk]]:
        """Yield the master weights, and their moments if wanted, in buckets of chunks, on the device.

        Resident weights are one bucket. A chunk has at most `at_once` elements (None: a whole master), or one row.
        `changes` says whether host memory gets the changed values back.
        """
        max_numel = at_once if self.host is None else min(BUCKET, at_once or BUCKET)
        bounds: list[list[tuple[Tensor, int, int]]] = []
        filled = 0
        for master in masters:
            rows, columns = self.shape(master)
            count = rows if max_numel is None else max(1, max_numel // max(1, columns))
            for start in range(0, rows, max(1, count)):
                stop = min(start + count, rows)
                numel = (stop - start) * columns
                if not bounds or (self.host is not None and filled + numel > BUCKET):
                    bounds.append([])
                    filled = 0
                bounds[-1].append((master, start, stop))
                filled += numel
        buckets = [[self._chunk(*bound, moments) for bound in bucket] for bucket in bounds]
        tensors = [[x for chunk in bucket for x in _tensors(chunk)] for bucket in buckets]
        visited = iter(tensors) if self.host is None else self.host.visit(tensors, changes=changes)
        for bucket, bucket_tensors in zip(buckets, visited, strict=True):
            tensor_iterator = iter(bucket_tensors)
            yield [_moved(chunk, tensor_iterator) for chunk in bucket]

    def _chunk(self, master: Tensor, start: int, stop: int, moments: bool) -> Chunk:
        """Return a chunk where it lies."""
        stored = self.moments_of(master) if moments else {}
        rows = {slot: tuple(tensor[start:stop] for tensor in moment) for slot, moment in stored.items()}
        return Chunk(master, start, stop, master.view(self.shape(master))[start:stop], rows)

    def moments_of(self, master: Tensor) -> dict[str, MomentTensors]:
        """Return the moments of a master weight, zeros before its first step."""
        if master not in self._moments:
            # In host memory the moments of all masters are one block, which is pinned once.
            new_masters = [master] if self.host is None else self.masters
            empty_moments = [
                (new_master, slot, storage.empty(*self.shape(new_master), new_master.dtype))
                for new_master in new_masters
                for slot, storage in self.storages.items()
            ]
            flat = [tensor for _, _, moment in empty_moments for tensor in moment]
            if self.host is None:
                zeros = iter([torch.zeros_like(tensor, device=master.device) for tensor in flat])
            else:
                zeros = iter(self.host.zeros(flat))
            for new_master, slot, moment in empty_moments:
                self._moments.setdefault(new_master, {})[slot] = tuple(next(zeros) for _ in moment)
        return self._moments[master]

    def state(self, master: Tensor) -> dict[str, Tensor]:
        """Return the state of a master weight by slot, empty before its first step; 8 bits as fp32 in host memory."""
        if not self.steps[master]:
            return {}
        state = {}
        for slot, moment in self.moments_of(master).items():
            values = moment[0]
            if len(moment) > 1:
                values = torch.empty(values.shape)
                for chunk in (chunk for bucket in self.visit([master], changes=False) for chunk in bucket):
                    values[chunk.start : chunk.stop].copy_(self.storages[slot].read(chunk.moments[slot]))
            state[slot] = values.view(master.shape)
        return {"step": torch.tensor(float(self.steps[master])), **state}

    def load_state(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a master weight; an empty state is the state before the first step."""
        self.steps[master] = int(state["step"]) if state else 0
        if not state and master not in self._moments:
            return
        for chunk in (chunk for bucket in self.visit([master]) for chunk in bucket):
            for slot, moment in chunk.moments.items():
                if not state:
                    for tensor in moment:
                        tensor.zero_()
                    continue
                values = chunk.rows_of(state[slot].detach().contiguous())
                wide = torch.promote_types(master.dtype, torch.float32)
                self.storages[slot].write(moment, values.to(chunk.values.device, wide))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the moments."""
        for moments in self._moments.values():
            for moment in moments.values():
                yield from moment


def _tensors(chunk: Chunk) -> Iterator[Tensor]:
    yield chunk.values
    for moment in chunk.moments.values():
        yield from moment


def _moved(chunk: Chunk, tensors: Iterator[Tensor]) -> Chunk:
    """Return a chunk with the next tensors, in the order of `_tensors`."""
    values = next(tensors)
    moments = {slot: tuple(next(tensors) for _ in moment) for slot, moment in chunk.moments.items()}
    return chunk._replace(values=values, moments=moments)
