"""Proof that two functions compute the same: results and gradients, in fp32 on random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Differences in parts of the largest element. Functions differ by far more than orders of summation do.
_TOLERANCE = 1e-4


class With:
    """A module as the code of its `forward` sees it, with other numbers in some of its attributes."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random numbers in fp32 on the CPU, whatever torch's defaults are."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def agree(
    own: Callable[..., Any], ours: Callable[..., Any], inputs: list[Tensor], *, unless_refused: bool = False
) -> bool:
    """Whether two functions give the same results and the same gradients of their inputs, but for roundings.

    `unless_refused`: also when the first one does not take the inputs.
    """
    try:
        expected = _results_and_gradients(own, inputs)
    except Exception:  # another model's code may refuse our numbers in any way: then it keeps its place
        return unless_refused
    actual = _results_and_gradients(ours, inputs)
    return len(actual) == len(expected) and all(
        a.shape == b.shape and (a - b).abs().max().item() <= _TOLERANCE * b.abs().max().item()
        for a, b in zip(actual, expected, strict=True)
    )


@torch.enable_grad()
def _results_and_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = function(*leaves)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    generator = torch.Generator().manual_seed(1)
    upstream = [normal(x.shape, generator).to(x) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, upstream))]
