"""`ParallelModule` and `WideModule`: the bases of layers; copies share the process groups of the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_layers.distributed.group_rendezvous import existing_groups


class ParallelModule(nn.Module):
    """A module whose `copy.deepcopy` shares the process groups, such as for a reference policy.

    A module with groups cannot be pickled; pickle its `state_dict` instead.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if dist.is_initialized():
            memo.update({id(group): group for group in existing_groups()})
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin


class WideModule(ParallelModule):
    """A module whose own parameters keep their dtype when a model is cast to a narrower one: fp32 beside bf16."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(x: Tensor) -> Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype.itemsize < x.dtype.itemsize else moved

        return super()._apply(move, recurse)


def wide_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of such parameters in a layer of `dtype` (None: torch's default): at least fp32."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
