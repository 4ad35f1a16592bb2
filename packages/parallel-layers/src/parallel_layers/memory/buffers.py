"""Contiguous memory: one aligned buffer per dtype, carved into named tensors.

One buffer needs one copy or one collective where many small tensors need many. Every tensor starts at a multiple of 128
bytes, as Megatron-Core's buffers and vectorised kernels require.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes


@dataclass(frozen=True)
class Slot:
    """The place of a named tensor: `numel` elements from element `offset` of the buffer of `dtype`."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class ContiguousBuffer:
    """One allocation of `numel` elements of `dtype` whose first byte is 128-byte aligned.

    Args:
        numel: Number of elements; 0 is allowed.
        dtype: Any floating point, integer or bool dtype.
        device: Default: the CPU.
        pin_memory: Lock the host memory, so that copies to and from a GPU run asynchronously. The memory returns to the
            system with the buffer. torch's own allocator would round up to a power of two and keep freed memory.

    Raises:
        ValueError: `numel` is negative.
        RuntimeError: The system cannot lock so much memory.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, *, device: torch.device | str = "cpu", pin_memory: bool = False
    ) -> None:
        if numel < 0:
            raise ValueError(f"numel={numel} is negative")
        storage = torch.zeros(numel * dtype.itemsize + ALIGNMENT, dtype=torch.uint8, device=device)
        if pin_memory:
            _lock_pages(storage, self)
        start = -storage.data_ptr() % ALIGNMENT
        self.data = storage[start : start + numel * dtype.itemsize].view(dtype)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.data.numel()

    def carve(self, offset: int, shape: Iterable[int]) -> Tensor:
        """Return a view of `shape` over the elements from `offset` on.

        Raises:
            ValueError: The view would not start at a multiple of 128 bytes, or not lie within the buffer.
        """
        size = torch.Size(shape)
        step = alignment_of(self.data.dtype)
        if offset % step:
            raise ValueError(f"offset={offset} is not a multiple of {step} {self.data.dtype} elements (128 bytes)")
        if offset < 0 or min(size, default=0) < 0 or offset + math.prod(size) > self.numel:
            raise ValueError(
                f"shape {tuple(size)} at offset {offset} does not lie within a buffer of {self.numel} elements"
            )
        return self.data[offset : offset + math.prod(size)].view(size)


def _lock_pages(memory: Tensor, owner: object) -> None:
    """Lock host memory for the lifetime of its owner."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    # At exit the driver has gone and has released its locks.
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False


def alignment_of(dtype: torch.dtype) -> int:
    """Return the number of elements of `dtype` in 128 bytes."""
    return ALIGNMENT // dtype.itemsize


def plan_slots(
    tensors: Mapping[str, tuple[Iterable[int], torch.dtype]],
) -> tuple[dict[str, Slot], dict[torch.dtype, int]]:
    """Lay out named (shape, dtype) pairs in memory, in the order of the mapping.

    Returns:
        The slot of each name, and the number of elements of each dtype's buffer.
    """
    slots: dict[str, Slot] = {}
    used: dict[torch.dtype, int] = {}
    for name, (shape, dtype) in tensors.items():
        step = alignment_of(dtype)
        slots[name] = slot = Slot(dtype, torch.Size(shape), used.get(dtype, 0))
        used[dtype] = slot.offset + math.ceil(slot.numel / step) * step
    return slots, used


class NamedBuffers(Mapping[str, Tensor]):
    """Named tensors that are views of one contiguous, aligned buffer per dtype.

    Args:
        tensors: (shape, dtype) of each name, in the order in memory.
        device: As for `ContiguousBuffer`.
        pin_memory: As for `ContiguousBuffer`.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Iterable[int], torch.dtype]],
        *,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        self.slots, sizes = plan_slots(tensors)
        self.buffers = MappingProxyType(
            {dtype: ContiguousBuffer(n, dtype, device=device, pin_memory=pin_memory) for dtype, n in sizes.items()}
        )
        self._views = {
            name: self.buffers[slot.dtype].carve(slot.offset, slot.shape) for name, slot in self.slots.items()
        }

    @classmethod
    def like(
        cls, tensors: Mapping[str, Tensor], *, device: torch.device | str = "cpu", pin_memory: bool = False
    ) -> "NamedBuffers":
        """Return buffers for tensors of these names, shapes and dtypes; values are not copied."""
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        return cls(shapes, device=device, pin_memory=pin_memory)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers, with alignment gaps."""
        return sum(buffer.data.nbytes for buffer in self.buffers.values())

    @torch.no_grad()
    def copy_from(self, tensors: Mapping[str, Tensor], *, non_blocking: bool = False) -> None:
        """Copy every named tensor into the buffers.

        Raises:
            ValueError: Names, a shape or a dtype differ from those of the buffers; nothing is copied then.
        """
        if missing := sorted(self.keys() ^ tensors.keys()):
            raise ValueError(f"names differ from the buffers': {missing[:8]}")
        for name, slot in self.slots.items():
            tensor = tensors[name]
            if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}, its slot {tuple(slot.shape)} {slot.dtype}"
                )
        for name, view in self._views.items():
            view.copy_(tensors[name], non_blocking=non_blocking)


def map_parameters(parameters: Mapping[str, torch.nn.Parameter], *, gradients: bool = False) -> NamedBuffers:
    """Move parameters, or with `gradients` their gradients, into one contiguous buffer per dtype; values stay.

    Each `.grad` becomes a view of the buffer (zero without a gradient before), so that one operation clips, reduces or
    clears all gradients. Clear them with `buffer.zero_()`: `zero_grad(set_to_none=True)` would drop the views.

    Raises:
        ValueError: A parameter has two names, or the parameters are on several devices.
    """
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ValueError(f"{first} and {name} are one parameter; give it once")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"the parameters lie on several devices {sorted(map(str, devices))}; map each device's apart")
    if not parameters:
        return NamedBuffers({})
    buffers = NamedBuffers.like(parameters, device=devices.pop())
    with torch.no_grad():
        for name, parameter in parameters.items():
            source = parameter.grad if gradients else parameter
            if source is not None:
                buffers[name].copy_(source)
            if gradients:
                parameter.grad = buffers[name]
            else:
                parameter.data = buffers[name]
    return buffers
