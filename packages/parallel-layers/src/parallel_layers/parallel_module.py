"""What the layers have in common: a copy of a layer works over the groups of the original."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch.distributed as dist
from torch import nn


class ParallelModule(nn.Module):
    """A module that may hold process groups, which `copy.deepcopy` shares with the copy: they cannot be copied.

    So a reference policy or a moving average is `copy.deepcopy(model)`, as of any model. (A module with groups cannot
    be pickled; its `state_dict` can.)
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if dist.is_initialized():
            memo.update({id(group): group for group in dist.distributed_c10d._world.pg_map})
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin
