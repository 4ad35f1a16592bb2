"""Device memory given up between phases: a model's weights, its optimizer's state, or both, on the host meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from parallel_layers.memory import HostOffload
from parallel_layers.sharding import is_dtensor
from rl_models.engines.fsdp import release


class Offload:
    """Where the weights (with their gradients) and the optimizer's state of one engine are.

    Storages move, not tensors: every reference to a parameter finds its numbers again, bit for bit.

    Args:
        module: with the weights.
        optimizer_state: gives the optimizer's tensors.
        pin_memory: of the host's buffers; default with a GPU.
    """

    def __init__(
        self, module: nn.Module, optimizer_state: Callable[[], Iterable[Tensor]], *, pin_memory: bool | None = None
    ) -> None:
        self.module, self.optimizer_state = module, optimizer_state
        self._weights = HostOffload(pin_memory=pin_memory)
        self._optimizer = HostOffload(pin_memory=pin_memory)

    def offload(self, *, weights: bool, optimizer: bool) -> int:
        """Move to the host what is not there yet; returns the bytes given up on the device."""
        freed = 0
        if optimizer and not self._optimizer.offloaded:
            freed += self._optimizer.offload(self.optimizer_state())
        if weights and not self._weights.offloaded:
            release(self.module)
            freed += self._weights.offload(_memory(self.module))
        if freed and torch.accelerator.is_available():
            # torch would keep the memory for this process; one that shares the device may need it.
            torch.accelerator.empty_cache()
        return freed

    def onload(self, *, weights: bool, optimizer: bool) -> None:
        """Bring back what is away."""
        if weights:
            self._weights.onload()
        if optimizer:
            self._optimizer.onload()

    def require(self, what: str, *, optimizer: bool = False) -> None:
        """Raise RuntimeError if the weights, or what else a method needs, are away."""
        away = [
            name
            for name, offload, needed in (
                ("weights", self._weights, True),
                ("optimizer state", self._optimizer, optimizer),
            )
            if needed and offload.offloaded
        ]
        if away:
            raise RuntimeError(f"{what} needs the {' and the '.join(away)}, which are offloaded; call onload() first")


def _memory(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and their gradients as this rank holds them, and buffers."""
    for parameter in module.parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                yield tensor.to_local() if is_dtensor(tensor) else tensor
    yield from module.buffers()
