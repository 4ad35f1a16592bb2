"""Device memory given up for a while: tensors' bytes go to one reused host buffer and come back, bit for bit.

In reinforcement learning on language models, generation and training take turns on the same GPUs. What moves here are
storages, not tensors: parameters that are views of one buffer, optimizer shards that are views of parameters, and every
Python reference to any of them stay as they are, and find their numbers again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel_layers.memory.buffers import ALIGNMENT, ContiguousBuffer


class HostOffload:
    """Moves tensors to the host and back; the host buffer is made once, as large as the largest offload yet.

    Args:
        pin_memory: page-locked host memory: the copies run at the bus's full speed. Default: with a GPU.

    The host holds one copy, never more: bytes are copied straight from the device into their place.
    """

    def __init__(self, *, pin_memory: bool | None = None) -> None:
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._buffer = ContiguousBuffer(0, torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, int, int | None]] = []

    @property
    def offloaded(self) -> bool:
        """Whether tensors are away; reading one then is an error of the caller's."""
        return bool(self._away)

    @property
    def host_bytes(self) -> int:
        """Size of the host buffer."""
        return self._buffer.numel

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor], *, discard: Iterable[Tensor] = ()) -> int:
        """Copy the memory of tensors to the host and give it up on their device.

        Args:
            tensors: what must come back; several views of one memory count once.
            discard: what need not (gradients between two steps): its memory is given up uncopied, and is zero when
                it comes back. Memory that `tensors` use, too, is copied.

        Returns:
            Bytes given up on the device.

        Raises:
            RuntimeError: tensors are away already.
            ValueError: torch cannot give up the memory of one; nothing has been moved.
        """
        if self._away:
            raise RuntimeError("tensors are offloaded already; call onload first")
        kept = _storages(tensors)
        dropped = {key: storage for key, storage in _storages(discard).items() if key not in kept}
        if fixed := [storage.nbytes() for storage in (*kept.values(), *dropped.values()) if not storage.resizable()]:
            raise ValueError(
                f"memory of {fixed[0]} bytes ({len(fixed)} in all) cannot be given up: it is not torch's own, but a "
                "mapped file's, say; clone() the tensors first"
            )
        offsets, size = {}, 0
        for key, storage in kept.items():
            offsets[key] = size
            size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if size > self._buffer.numel:
            self._buffer = ContiguousBuffer(0, torch.uint8)  # before the larger one is made
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
        """Bring everything back; without an offload before, nothing happens."""
        for storage, nbytes, offset in self._away:
            storage.resize_(nbytes)
            if offset is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(self._buffer.carve(offset, (nbytes,)), non_blocking=True)
        _wait()
        self._away = []


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct memories of tensors, in order; empty ones left out."""
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
