"""Gradients of weights that a backward writes in the dtype of their sum, or adds to the sum in place.

Autograd makes the gradient of a bf16 weight in bf16, casts it where the sum is fp32, and adds it to the sum: three
passes over memory in each micro-batch, and up to two copies of the gradient. The backwards of linear layers, experts,
embedding and head can write fp32 themselves, rounded once. For parameters of `sum_in_place_` they add to the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

_MARK = "_sums_gradients_in_place"


def sum_in_place_(parameters: Iterable[nn.Parameter]) -> None:
    """Let backwards add to the gradients of these parameters in place, where they have gradients already.

    This is for loops over `loss.backward()`: tensor hooks of the parameters and `torch.autograd.grad` do not get such a
    gradient. What replaces a parameter, such as FSDP2 or a deep copy, ends it.
    """
    for parameter in parameters:
        setattr(parameter, _MARK, True)


class Destination(NamedTuple):
    """The dtype of a weight's gradient (`grad_dtype`), and the parameter to whose gradient the backward may add."""

    dtype: torch.dtype
    parameter: Tensor | None

    @classmethod
    def of(cls, weight: Tensor) -> Destination:
        """Return the destination, in a forward. A weight that autograd computes has a gradient of its dtype."""
        if torch.compiler.is_compiling() or not weight.is_leaf:
            return cls(weight.dtype, None)
        return cls(weight.grad_dtype or weight.dtype, weight if getattr(weight, _MARK, False) else None)

    @property
    def sum(self) -> Tensor | None:
        """The sum to which the backward adds, contiguous; None: it returns the gradient."""
        gradient = None if self.parameter is None else self.parameter.grad
        return gradient if gradient is not None and gradient.is_contiguous() else None
