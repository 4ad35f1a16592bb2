"""torch.autocast for functions that choose the dtypes of their GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def autocasts(x: Tensor) -> bool:
    """Return whether torch.autocast is on for the device of `x`; the meta device has no autocast."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without torch.autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def as_operand(x: Tensor) -> Tensor:
    """Cast `x` as torch.autocast casts an operand of a GEMM; fp64 and integers stay as they are."""
    if not autocasts(x) or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate `function` to run with torch.autocast off on the device of its first tensor.

    Bodies of operators and backwards use it, so that their GEMMs have the dtypes of the forward.
    """

    @wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with autocast_off(next(x for x in args if isinstance(x, Tensor))):
            return function(*args, **kwargs)

    return outside


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, at least fp32."""
    return torch.promote_types(dtype, torch.float32)
