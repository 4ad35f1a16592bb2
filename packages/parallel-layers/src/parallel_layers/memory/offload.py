"""Free device memory for a while: move tensors to one reused host buffer and back, bit for bit.

In reinforcement learning, generation and training take turns on the same GPUs. The storages move, so views of
parameters and all Python references stay valid and have their values again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel_layers.device.gpus import gpu, pin

# Storages start at multiples of this many bytes in the host buffer.
_ALIGNMENT = 128


class HostOffload:
    """Moves tensors to the host and back; the host buffer is as large as the largest offload so far."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def offloaded(self) -> bool:
        """True while tensors are offloaded; reading such a tensor is the caller's mistake."""
        return bool(self._away)

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
        stored = _storages(tensors)
        dropped = {key: storage for key, storage in _storages(discard).items() if key not in stored}
        if fixed := [storage.nbytes() for storage in (*stored.values(), *dropped.values()) if not storage.resizable()]:
            raise ValueError(
                f"memory of {fixed[0]} bytes ({len(fixed)} in all) cannot be freed: torch does not own it (a mapped "
                "file, for example); clone() the tensors first"
            )
        size = sum(_padded(storage) for storage in stored.values())
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before the new one is allocated
            self._buffer = host_memory(size)
        away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        offset = 0
        for storage in stored.values():
            slot = self._buffer[offset : offset + storage.nbytes()]
            slot.copy_(_bytes(storage), non_blocking=True)
            away.append((storage, storage.nbytes(), slot))
            offset += _padded(storage)
        away += [(storage, storage.nbytes(), None) for storage in dropped.values()]
        _wait()
        for storage, _, _ in away:
            storage.resize_(0)
        self._away = away
        return sum(nbytes for _, nbytes, _ in away)

    @torch.no_grad()
    def onload(self) -> None:
        """Return all offloaded memory to the device; without an offload before, do nothing."""
        for storage, nbytes, place in self._away:
            storage.resize_(nbytes)
            if place is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(place, non_blocking=True)
        _wait()
        self._away = []


def host_memory(nbytes: int) -> Tensor:
    """Return zeros `[nbytes]` uint8 in host memory, pinned if there is a GPU.

    torch's own pinned memory would be rounded up to a power of two, and kept after it is freed.
    """
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    if nbytes and gpu.is_available():  # CUDA refuses to pin nothing
        pin(memory)
    return memory


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct, non-empty storages of tensors, in order."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage.data_ptr(), storage)
    return storages


def _padded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if gpu.is_available():
        gpu.synchronize()
