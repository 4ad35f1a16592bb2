"""Replace torch's functional all-gather of CPU tensors by an operator that does not corrupt memory.

The two threads of a gloo group (as of torch 2.13) write the name of their last collective into one std::string without
a lock. A name of more than 15 characters is on the heap, so two writes at once free it twice. The functional all-gather
has such a name (ALLGATHER_COALESCED). Its variant with an `out` is called ALLGATHER; that variant takes complex tensors
only as pairs of real numbers. All other names are short.

The replacement is registered with torch's dispatcher, so it also serves DTensor and FSDP2 in this process.
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
    """Register the operator; later calls do nothing. The cached library keeps the operator registered."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    return library
