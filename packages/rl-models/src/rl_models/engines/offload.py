"""`Offload`: weights and optimizer state on the host between phases, to free device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from parallel_layers.memory import HostOffload
from parallel_layers.sharding import is_dtensor
from rl_models.engines.fsdp import release


class Offload:
    """Moves the weights (with their gradients) and the optimizer's state of one engine to the host and back.

    Storages move and tensor objects stay, so every reference to a parameter finds the same numbers, bit for bit.

    Args:
        module: The module with the weights.
        optimizer_state: Returns the optimizer's tensors.
    """

    def __init__(self, module: nn.Module, optimizer_state: Callable[[], Iterable[Tensor]]) -> None:
        self.module, self.optimizer_state = module, optimizer_state
        self._weights, self._optimizer = HostOffload(), HostOffload()

    def offload(self, *, weights: bool, optimizer: bool) -> int:
        """Move tensors to the host; return the bytes freed on the device."""
        freed = 0
        if optimizer and not self._optimizer.offloaded:
            freed += self._optimizer.offload(self.optimizer_state())
        if weights and not self._weights.offloaded:
            release(self.module)
            freed += self._weights.offload(_memory(self.module))
        if freed and torch.accelerator.is_available():
            # torch would keep the memory for this process; other processes on the device may need it.
            torch.accelerator.empty_cache()
        return freed

    def onload(self, *, weights: bool, optimizer: bool) -> None:
        """Bring offloaded tensors back."""
        if weights:
            self._weights.onload()
        if optimizer:
            self._optimizer.onload()

    def require(self, what: str, *, optimizer: bool = False) -> None:
        """Raise RuntimeError if the weights, or with `optimizer` the optimizer's state, are offloaded."""
        needed = {"weights": self._weights} | ({"optimizer state": self._optimizer} if optimizer else {})
        away = [name for name, memory in needed.items() if memory.offloaded]
        if away:
            raise RuntimeError(f"{what} needs the {' and the '.join(away)}, which are offloaded; call onload() first")


def _memory(module: nn.Module) -> Iterator[Tensor]:
    """Yield the local parameters, their gradients, and the buffers."""
    for parameter in module.parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                yield tensor.to_local() if is_dtensor(tensor) else tensor
    yield from module.buffers()
