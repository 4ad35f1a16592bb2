"""Combine the value of one function with the gradient of another."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_gradient_of(ordinary: Callable[..., Tensor], value: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `value(*tensors)` with the gradient of `ordinary(*tensors)`, which differs only by rounding.

    The backward recomputes the ordinary function.
    """
    result: Tensor = _WithGradientOf.apply(ordinary, value, *tensors)
    return result


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordinary: Callable[..., Tensor], value: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*tensors)
        return value(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            y = ctx.ordinary(*leaves)
        gradients = iter(torch.autograd.grad(y, [x for x in leaves if x.requires_grad], gradient))
        return None, None, *(next(gradients) if wanted else None for wanted in needed)
