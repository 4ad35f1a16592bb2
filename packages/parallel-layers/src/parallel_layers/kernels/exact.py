"""GEMMs and functions whose bits do not depend on shapes, threads or places, for a CPU and for fp32.

`exact_product` has no intermediate rounding. It is the splitting of Ozaki, Ogita, Oishi and Rump (https://doi.org/10.1007/s11075-011-9478-1):

    x = x1 + x2 + rest,   w = w1 + w2 + rest,   each part b bits wide, relative to the largest number of its row

With b = (55 - log2 K) / 2 every partial sum of x1 w1 is an integer of at most 53 bits in units of its row and column,
so an fp64 GEMM of x1 and w1 is exact, and so are the GEMMs of x1, w2 and of x2, w1. The rest is below 2^-40 of the
largest product. The three fp64 GEMMs are added elementwise.

`in_double` computes in fp64 and rounds once. On a CPU the last bit of torch's functions depends on an element's place
in the tensor, and the last bit of sums on the shape. In fp64 the difference changes about one rounded result in 10^8.

Shape suffixes: M rows, N columns of the result, K contraction.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_WEIGHT = 1 << 24  # numbers of W that are split at a time: 4 x 128 MiB in fp64


def in_double(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)` computed in fp64 and rounded to x's dtype; on CUDA in x's dtype."""
    return function(x) if x.is_cuda else function(x.double()).to(x.dtype)


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x W^T` computed exactly and rounded to fp32: `[..., M, K]`, `[..., N, K]` -> `[..., M, N]`."""
    size, columns = x.shape[-1], weight.shape[-2]
    if not size:
        return x.new_zeros(*x.shape[:-1], columns, dtype=torch.float32)
    bits = (55 - (size - 1).bit_length()) // 2
    x_high, x_low = _split(x, bits)
    step = max(1, _MAX_WEIGHT // (size * max(1, weight.shape[:-2].numel())))
    results = []
    for rows in weight.split(step, dim=-2):
        high, low = (half.transpose(-1, -2) for half in _split(rows, bits))
        results.append((x_high @ high + (x_high @ low + x_low @ high)).float())
    return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def _split(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return fp64 `x1` and `x2`, multiples of 2^(1 - bits) and 2^(1 - 2 bits) times the power of two above max |x|."""
    x = x.double()
    largest = x.abs().amax(dim=-1, keepdim=True)
    _, exponent = torch.frexp(largest)
    high = _round_to(x, exponent + 53 - bits)
    return high, _round_to(x - high, exponent + 53 - 2 * bits)


def _round_to(x: Tensor, exponent: Tensor) -> Tensor:
    """Round `x` to multiples of 2^(exponent - 52), by adding and subtracting a number with this last place."""
    anchor = 1.5 * ((exponent.long() + 1023) << 52).view(torch.float64)
    return (x + anchor) - anchor
