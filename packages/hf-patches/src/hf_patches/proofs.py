"""Compare two functions on random fp32 numbers: results and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# In parts of the largest element. Different functions differ by far more than different orders of summation.
TOLERANCE = 1e-4


class ModuleView:
    """A view of a module with other values in some attributes, to run the code of its `forward` on."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random fp32 numbers on the CPU, independent of torch's defaults."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def agree(
    original: Callable[..., Any], replacement: Callable[..., Any], inputs: list[Tensor], *, unless_refused: bool = False
) -> bool:
    """Return whether two functions have the same results and gradients of their inputs, up to rounding.

    With `unless_refused`, also return True if the first function raises on the inputs.
    """
    try:
        expected = _results_and_gradients(original, inputs)
    except Exception:  # a model's code may refuse these numbers with any error; then its code stays in use
        return unless_refused
    actual = _results_and_gradients(replacement, inputs)
    return len(actual) == len(expected) and all(
        a.shape == b.shape and (a - b).abs().max().item() <= TOLERANCE * b.abs().max().item()
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
