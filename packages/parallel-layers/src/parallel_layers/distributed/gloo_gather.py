"""torch's functional all-gather of CPU tensors, by an operator that does not corrupt memory; see `install`.

`_c10d_functional::all_gather_into_tensor` begins what gloo calls ALLGATHER_COALESCED. A gloo group (as of torch 2.13)
has two threads, which write the name of what each has just completed into one std::string, without a lock. A name of
more than 15 characters takes memory, and two writes at once free it twice: soon where several gathers are under way,
and every few million times where each is waited for, as DTensor does. The operator's variant with an `out` is called
ALLGATHER; the names of the other collectives are short as well. It takes no complex numbers, but pairs of real ones.

Given to torch's dispatcher for CPU tensors, it serves everybody in this process: DTensor, FSDP2, and this package.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_into = torch.ops._c10d_functional.all_gather_into_tensor_out


def _all_gather_into_tensor(x: Tensor, group_size: int, group_name: Any) -> Tensor:
    out = x.new_empty(group_size * x.shape[0], *x.shape[1:])
    pair = torch.view_as_real if x.is_complex() else torch.Tensor.detach
    _into(pair(x), group_size, group_name, out=pair(out))
    return out


@functools.cache
def install() -> torch.library.Library:
    """Give the operator to torch's dispatcher, once. The library must live on: the operator goes with it."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    return library
