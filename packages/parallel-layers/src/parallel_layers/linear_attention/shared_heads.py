"""`SharedHeads`: sums over the tensor-parallel ranks that have the same head."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel


class SharedHeads:
    """Heads over a tensor-parallel group: with more ranks than heads, consecutive ranks share a head.

    There is no process group of these ranks alone: an all-reduce over the whole group has a slot for each head. Without
    shared heads nothing is sent.

    Args:
        group: The tensor-parallel group; None: one rank.
        heads: The heads over all ranks.
    """

    def __init__(self, group: ProcessGroup | None, heads: int) -> None:
        tp = 1 if group is None else group.size()
        self.group, self.heads, self.replicas = group, heads, max(tp // heads, 1)

    def copy(self, x: Tensor) -> Tensor:
        """Return `x`, the same on the ranks of a head, from which each then computes a part of the result.

        Forward: none. Backward: one all-reduce of `[heads, *x.shape]`.
        """
        return x if self.replicas == 1 else copy_to_tensor_parallel(self._slots(x), self.group)[self._slot]

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks of a head, each of which computes a part of the result from the sum.

        Forward and backward: one all-reduce of `[heads, *x.shape]`.
        """
        if self.replicas == 1:
            return x
        total = reduce_from_tensor_parallel(self._slots(x), self.group)
        return copy_to_tensor_parallel(total, self.group)[self._slot]

    @property
    def _slot(self) -> int:
        return 0 if self.group is None else self.group.rank() // self.replicas

    def _slots(self, x: Tensor) -> Tensor:
        return torch.stack([x if slot == self._slot else torch.zeros_like(x) for slot in range(self.heads)])
