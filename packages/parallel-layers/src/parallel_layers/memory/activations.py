"""Activation offload: what layers save for their backward goes to host memory and returns, while other layers compute.

    main stream   forward:  layer 0 | layer 1 | layer 2 | ...      backward: ... | layer 2 | layer 1 | layer 0
    copies                            0 out   |  1 out                           |  1 in   |  0 in

The device holds the saved tensors of two layers. The last two layers' tensors stay there. Host memory is pinned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel_layers.device.gpus import gpu
from parallel_layers.device.names import GPU
from parallel_layers.module.sharding import is_dtensor


class ActivationOffload:
    """Offloads the activations of a model's layers, which are wrapped in their order.

    Each forward of the first layer begins a chain of layers. A layer's saved tensors go to the host while the next
    layer of the chain computes. In the backward they return while that next layer computes. Parameters, tensors that
    the layer was given and that need no gradient (rotary tables), and tensors below `min_bytes` stay on the device.

    On a CPU the copies are of the same memory, for tests.
    """

    def __init__(self, min_bytes: int = 1 << 20) -> None:
        self.min_bytes = min_bytes
        self._recent: list[_Layer] = []  # the last two layers
        self._streams: dict[torch.device, gpu.Stream] = {}

    def begin(self, *, first: bool) -> _Layer:
        """Begin a layer: send the layer before to the host, and free the device memory of the layer before that."""
        if len(self._recent) == 2:
            self._recent[0].release()
        for previous in self._recent[-1:]:
            previous.send()
        layer = _Layer(self, None if first or not self._recent else self._recent[-1])
        self._recent = [*self._recent[-1:], layer]
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        memo[id(self)] = copied = ActivationOffload(self.min_bytes)
        return copied

    def stream(self, device: torch.device) -> gpu.Stream:
        """Return the stream of the copies of a device."""
        if device not in self._streams:
            self._streams[device] = gpu.Stream(device)
        return self._streams[device]


class OffloadedLayer:
    """Replaces the `forward` of one layer; `first` begins a chain of layers."""

    def __init__(
        self, layer: nn.Module, forward: Callable[..., Any], offload: ActivationOffload, *, first: bool
    ) -> None:
        self.layer, self.inner_forward, self.offload, self.first = layer, forward, offload, first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer."""
        if not torch.is_grad_enabled():
            return self.inner_forward(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        leaves += tree_leaves([vars(x) for x in leaves if is_dataclass(x)])  # a description of the batch
        constants = [x for x in leaves if isinstance(x, Tensor) and not x.requires_grad]
        chained = self.offload.begin(first=self.first)
        chained.layer, chained.constants = self.layer, {x.untyped_storage().data_ptr() for x in constants}
        with torch.autograd.graph.saved_tensors_hooks(chained.pack, _unpack):
            return self.inner_forward(*args, **kwargs)


class _Layer:
    """The record of one forward of one layer. Autograd owns the saved tensors and frees them with the graph."""

    def __init__(self, offload: ActivationOffload, previous: _Layer | None) -> None:
        self.offload, self.previous = offload, previous
        self.layer: nn.Module
        self.constants: set[int] = set()
        self._saved: dict[tuple[object, ...], weakref.ref[_SavedTensor]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        """Return what autograd keeps of a tensor: a handle whose memory can move, or the tensor itself."""
        if type(tensor) is not Tensor or tensor.numel() * tensor.element_size() < self.offload.min_bytes:
            return tensor
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.constants or self._is_weight(storage):
            return tensor
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        saved = self._saved[key]() if key in self._saved else None
        if saved is None:
            saved = _SavedTensor(self, tensor)
            self._saved[key] = weakref.ref(saved)
        return saved

    def _is_weight(self, storage: int) -> bool:
        """Return whether a parameter has the storage now: FSDP2 gathers parts of a layer within its forward."""
        gathered = (x for x in self.layer.parameters() if not is_dtensor(x))
        return any(x.untyped_storage().data_ptr() == storage for x in gathered)

    def _live(self) -> list[_SavedTensor]:
        return [saved for saved in (reference() for reference in self._saved.values()) if saved is not None]

    def send(self) -> None:
        """Begin the copies to the host."""
        for saved in self._live():
            saved.send()

    def release(self) -> None:
        """Free the device memory of the tensors that are on the host."""
        for saved in self._live():
            saved.release()

    def fetch(self) -> None:
        """Begin the copies back to the device."""
        for saved in self._live():
            saved.fetch()


class _SavedTensor:
    """A saved tensor: on the device, on both sides, or on the host."""

    def __init__(self, layer: _Layer, tensor: Tensor) -> None:
        self.layer, self.device = layer, tensor.device
        # A detached alias: the tensor itself would hold the graph that holds this object.
        self.on_device: Tensor | None = tensor.detach()
        self.host: Tensor | None = None
        self._sent_event: gpu.Event | None = None
        self._fetched_event: gpu.Event | None = None

    def send(self) -> None:
        """Begin the copy to the host, once."""
        if self.host is None and self.on_device is not None:
            pinned = self.device.type == GPU
            self.host = torch.empty_like(self.on_device, device="cpu", pin_memory=pinned)
            self._sent_event = self._copy(self.host, self.on_device)

    def release(self) -> None:
        """Free the device memory, behind the copy in the order of the stream."""
        if self.host is not None:
            self._wait(self._sent_event)
            self.on_device = None

    def fetch(self) -> None:
        """Begin the copy back, if the tensor is not on the device."""
        if self.on_device is None:
            assert self.host is not None
            self.on_device = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self._fetched_event = self._copy(self.on_device, self.host)

    def value(self) -> Tensor:
        """Return the tensor on the device, and begin the return of the layer before."""
        self.fetch()
        if self.layer.previous is not None:
            self.layer.previous.fetch()
        self._wait(self._fetched_event)
        assert self.on_device is not None
        return self.on_device

    def _copy(self, to: Tensor, source: Tensor) -> gpu.Event | None:
        if self.device.type != GPU:
            to.copy_(source)
            return None
        stream = self.layer.offload.stream(self.device)
        stream.wait_stream(gpu.current_stream(self.device))
        with gpu.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def _wait(self, copied: gpu.Event | None) -> None:
        """Let the current stream wait for a copy."""
        if copied is not None:
            gpu.current_stream(self.device).wait_event(copied)


def _unpack(packed: Tensor | _SavedTensor) -> Tensor:
    return packed.value() if isinstance(packed, _SavedTensor) else packed
