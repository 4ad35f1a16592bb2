"""torch.autocast and the functions that choose the dtypes of their products themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def as_operand(x: Tensor) -> Tensor:
    """`x` as torch.autocast gives it to a product: in its dtype, but for fp64 and integers; outside of it as it is."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(device))


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` as it is outside of torch.autocast on the device of its first tensor.

    For the bodies of operators and for backwards, whose products have the dtypes of their forwards' wherever they run.
    """

    @wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(x for x in args if isinstance(x, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return outside


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, at least fp32."""
    return torch.promote_types(dtype, torch.float32)
