"""Tensors that lie in host memory and pass through the device bucket by bucket, such as an optimizer's state.

    copies in     bucket 1 | bucket 2 | bucket 3 | ...
    main stream            | bucket 1 | bucket 2 | bucket 3
    copies out                        | bucket 1 | bucket 2

Both directions of the bus and the device work at the same time (ZeRO-Offload, arXiv:2101.06840, with the update on the
device). The device holds three buckets during a pass, and nothing between two passes. Host memory is pinned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel_layers.memory.offload import host_memory

# Tensors start at multiples of this many bytes in the host's memory and in the device's.
_ALIGNMENT = 256
_SLOTS = 3


class StreamedTensors:
    """Allocates tensors in pinned host memory, and passes them through `device` in buckets.

    On a CPU the host's memory is the device's own: nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Tensor] = []

    def zeros(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros in one block of host memory, with the shapes and dtypes of tensors that may be on "meta"."""
        self._buffers.append(host_memory(sum(map(_padded, like))))
        return _views(self._buffers[-1], like)

    @torch.no_grad()
    def visit(self, buckets: Sequence[Sequence[Tensor]], *, changes: bool = True) -> Iterator[list[Tensor]]:
        """Yield the tensors of each bucket on the device, those in host memory as copies, device tensors as they are.

        A copy is valid until the next bucket is asked for. With `changes` it goes back to the host. When the iterator
        is exhausted, all copies have arrived.
        """
        streams = _streams(self.device)
        if streams is None or not buckets:
            yield from map(list, buckets)
            return
        main, inward, outward = streams
        moving = [[tensor for tensor in bucket if tensor.device.type == "cpu"] for bucket in buckets]
        size = max(sum(map(_padded, tensors)) for tensors in moving)
        slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(min(_SLOTS, len(buckets)))]
        free: list[torch.Event | None] = [None] * len(slots)
        # The memory of the slots may have had another use on the main stream.
        inward.wait_stream(main)

        def fetch(number: int) -> tuple[list[Tensor], torch.Event]:
            if (event := free[number % len(slots)]) is not None:
                inward.wait_event(event)
            views = _views(slots[number % len(slots)], moving[number])
            with inward:
                for view, tensor in zip(views, moving[number], strict=True):
                    view.copy_(tensor, non_blocking=True)
                return views, inward.record_event()

        try:
            coming = fetch(0)
            for number, bucket in enumerate(buckets):
                views, arrived = coming
                if number + 1 < len(buckets):
                    coming = fetch(number + 1)
                main.wait_event(arrived)
                copies = iter(views)
                yield [next(copies) if tensor.device.type == "cpu" else tensor for tensor in bucket]
                outward.wait_event(main.record_event())
                with outward:
                    for view, tensor in zip(views if changes else (), moving[number], strict=changes):
                        tensor.copy_(view, non_blocking=True)
                    free[number % len(slots)] = outward.record_event()
        finally:
            main.wait_stream(inward)
            main.wait_stream(outward)
            main.synchronize()


def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream, torch.Stream] | None:
    """Return the current stream, and a stream for each direction of the bus; None on a CPU."""
    return None if device.type == "cpu" else (torch.accelerator.current_stream(device), *_streams_of(device))


@functools.cache
def _streams_of(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(device), torch.Stream(device)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors with the shapes and dtypes of `like` one after another in `memory` (uint8)."""
    views, offset = [], 0
    for tensor in like:
        views.append(memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        offset += _padded(tensor)
    return views
