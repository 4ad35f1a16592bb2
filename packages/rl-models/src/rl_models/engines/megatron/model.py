"""`MegatronModel`: a rank's chunks of a GPTModel, with Megatron's global state and gradient memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from megatron_utils import MegatronGrid, megatron_device
from megatron_utils.gpt import PackedGPTModel
from megatron_utils.optimizer import gradient_buffers, wrap_data_parallel
from parallel_layers.memory import HostOffload
from rl_models.engines.options import MegatronOptions
from rl_models.grid import Grid


class MegatronModel:
    """The pipeline chunks of one rank, which `module` holds.

    `distributed_optimizer` says whether masters and moments are divided over the ranks that hold the same parameters.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        grid: Grid,
        enter: Callable[[], AbstractContextManager[MegatronGrid]],
        options: MegatronOptions,
    ) -> None:
        self.chunks, self.grid, self._enter = list(chunks), grid, enter
        self.module: nn.Module = nn.ModuleList(chunks)
        self.distributed_optimizer = options.distributed_optimizer and grid.dims.dp * grid.dims.cp > 1
        self._trained: list[Any] | None = None
        self._gradient_memory = HostOffload()

    @contextmanager
    def entered(self) -> Iterator[MegatronGrid]:
        """Enter Megatron's global state for this grid.

        Raises:
            ValueError: The device is not the current one, or a CPU without the stand-in.
            RuntimeError: Inside another `megatron_grid`.
        """
        check_device(self.grid.device)
        with self._enter() as megatron:
            yield megatron

    def trained(self, megatron: MegatronGrid) -> list[Any]:
        """Return the chunks with buffers for gradients, which the first call makes: a reference model has none."""
        if self._trained is None:
            self._trained = wrap_data_parallel(self.chunks, megatron, distributed=self.distributed_optimizer)
        return self._trained

    def with_gradients(self, megatron: MegatronGrid) -> list[Any]:
        """Return `trained` with its buffers in device memory."""
        chunks = self.trained(megatron)
        self._gradient_memory.onload()
        return chunks

    def drop_gradients(self) -> None:
        """Drop the gradients, and give up their memory until `with_gradients`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        if not self._gradient_memory.offloaded:
            self._gradient_memory.offload([], discard=gradient_buffers(self._trained or []))


def check_device(device: torch.device) -> None:
    """Raise ValueError unless `device` is the one that Megatron-Core computes on."""
    current = megatron_device()
    if current is None or device.type != current.type:
        raise ValueError(
            f"backend='megatron' does not compute on device={str(device)!r}; use a GPU, or, for tests and "
            "demonstrations on a CPU, enter megatron_utils.testing.cpu_stand_in() around everything"
        )
    if device.index not in (None, current.index):
        raise ValueError(f"{device} is not the current device; call torch.cuda.set_device({device.index}) first")
