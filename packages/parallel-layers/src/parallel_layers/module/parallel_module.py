"""`ParallelModule`: the base of the layers; copies share the process groups of the original."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch.distributed as dist
from torch import nn

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
