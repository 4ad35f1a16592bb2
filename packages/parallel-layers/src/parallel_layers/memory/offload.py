"""Free device memory for a while: move tensors to one reused host buffer and back, bit for bit.

In reinforcement learning, generation and training take turns on the same GPUs. The storages move, so views of
parameters and all Python references stay valid and have their values again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel_layers.memory.buffers import ALIGNMENT, ContiguousBuffer


class HostOffload:
    """Moves tensors to the host and back; the host buffer is as large as the largest offload so far.

    Args:
        pin_memory: Lock the host memory, so that copies run at the full speed of the bus. Default: with a GPU.
    """

    def __init__(self, *, pin_memory: bool | None = None) -> None:
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._buffer = ContiguousBuffer(0, torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, int, int | None]] = []

    @property
    def offloaded(self) -> bool:
        """Return whether tensors are offloaded; reading such a tensor is the caller's mistake."""
        return bool(self._away)

    @property
    def host_bytes(self) -> int:
        """Return the size of the host buffer in bytes."""
        return self._buffer.numel

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor], *, discard: Iterable[Tensor] = ()) -> int:
        """Copy the memory of tensors to the host and free it on their device.

        Args:
            tensors: Tensors whose values return with `onload`; several views of one storage count once.
            discard: Tensors whose memory is freed without a copy and returns as zeros (gradients between two steps).
                Memory that `tensors` use as well is copied.

        Returns:
            Bytes freed on the device.

        Raises:
            RuntimeError: Tensors are offloaded already.
            ValueError: torch cannot free the memory of a tensor; nothing has moved then.
        """
        if self._away:
            raise RuntimeError("tensors are offloaded already; call onload first")
        kept = _storages(tensors)
        dropped = {key: storage for key, storage in _storages(discard).items() if key not in kept}
        if fixed := [storage.nbytes() for storage in (*kept.values(), *dropped.values()) if not storage.resizable()]:
            raise ValueError(
                f"memory of {fixed[0]} bytes ({len(fixed)} in all) cannot be freed: torch does not own it (a mapped "
                "file, for example); clone() the tensors first"
            )
        offsets, size = {}, 0
        for key, storage in kept.items():
            offsets[key] = size
            size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if size > self._buffer.numel:
            self._buffer = ContiguousBuffer(0, torch.uint8)  # free the old buffer before the new one is allocated
            self._buffer = ContiguousBuffer(size, torch.uint8, pin_memory=self._pin_memory)
        for key, storage in kept.items():
            place = self._buffer.carve(offsets[key], (storage.nbytes(),))
            place.copy_(_bytes(storage), non_blocking=True)
        _wait()
        for key, storage in (*kept.items(), *dropped.items()):
            self._away.append((storage, storage.nbytes(), offsets.get(key)))
            storage.resize_(0)
        return sum(nbytes for _, nbytes, _ in self._away)

    @torch.no_grad()
    def onload(self) -> None:
        """Return all offloaded memory to the device; without an offload before, do nothing."""
        for storage, nbytes, offset in self._away:
            storage.resize_(nbytes)
            if offset is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(self._buffer.carve(offset, (nbytes,)), non_blocking=True)
        _wait()
        self._away = []


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct, non-empty storages of tensors, in order."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return found


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
