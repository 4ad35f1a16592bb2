"""Sums, exponentials, logarithms, sines and activations whose bits do not depend on an element's place in the tensor.

On a CPU torch computes most of a tensor with vector instructions and the rest with scalar code, which can differ in the
last bit; the order of its sums depends on the shape. These functions use only additions, products, quotients and roots
in fp64, which IEEE 754 defines to the bit. On CUDA torch's own functions treat all elements alike and are used.

Results have the argument's dtype and are within one ulp of the exact value in fp32.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]

_LN_2_HIGH = 0.693147180369123816490  # 32 bits, so that its products with small integers are exact (fdlibm's e_exp.c)
_LN_2_LOW = 1.90821492927058770002e-10
# pi / 2 in parts of 33 bits (fdlibm's e_rem_pio2.c).
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
_EXP_TERMS = [1 / math.factorial(n) for n in range(14)]
_ATANH_TERMS = [1 / (2 * n + 1) for n in range(13)]
_SIN_TERMS = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)]
_COS_TERMS = [(-1) ** n / math.factorial(2 * n) for n in range(10)]


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim by adding its second half to its first until one number is left: `[..., n] -> [...]`.

    Each addition is elementwise: the bits of a row's sum depend only on the row, on every device.
    """
    while (size := x.shape[-1]) > 1:
        half = size // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = pairs if size % 2 == 0 else torch.cat((pairs, x[..., 2 * half :]), dim=-1)
    return x[..., 0] if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _in_double(of_torch: Function) -> Callable[[Function], Function]:
    """Decorate a function of fp64 tensors: it takes any dtype and returns it, and on CUDA it is torch's."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def elementary(x: Tensor) -> Tensor:
            return of_torch(x) if x.is_cuda else function(x.double()).to(x.dtype)

        return elementary

    return decorate


@_in_double(torch.exp)
def exp(x: Tensor) -> Tensor:
    """Return e^x, for x up to 700."""
    x = x.clamp(min=-1000.0)
    turns = (x * (1 / math.log(2))).round()
    rest = x - turns * _LN_2_HIGH - turns * _LN_2_LOW
    power = (turns.nan_to_num().long() + 1023).clamp(min=0) << 52  # the bits of 2^n; 0 below the normal numbers
    return _polynomial(rest, _EXP_TERMS) * power.view(torch.float64)


@_in_double(torch.log)
def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive numbers.

    log(m 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)), with m within a factor sqrt(2) of 1.
    """
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, 2 * mantissa, mantissa)
    power = exponent.double() - small.double()
    ratio = (mantissa - 1) / (mantissa + 1)
    series = 2 * ratio * _polynomial(ratio * ratio, _ATANH_TERMS)
    return power * _LN_2_HIGH + (power * _LN_2_LOW + series)


@_in_double(torch.tanh)
def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent.

    Near 0 it is the quotient of the series of sinh and cosh, because 1 - 2 / (e^2x + 1) cancels there.
    """
    square = x * x
    sinh = x * _polynomial(square, [abs(c) for c in _SIN_TERMS])
    cosh = _polynomial(square, [abs(c) for c in _COS_TERMS])
    return torch.where(x.abs() < 0.5, sinh / cosh, 1 - 2 / (1 + exp((2 * x).clamp(max=700.0))))


@_in_double(torch.cos)
def cos(x: Tensor) -> Tensor:
    """Return the cosine of angles up to 2^20 quarter turns."""
    return _sine_of_quarters(x, 1)


@_in_double(torch.sin)
def sin(x: Tensor) -> Tensor:
    """Return the sine of angles up to 2^20 quarter turns."""
    return _sine_of_quarters(x, 0)


@_in_double(F.silu)
def silu(x: Tensor) -> Tensor:
    """Return x / (1 + e^-x)."""
    return x * (1 / (1 + exp((-x).clamp(max=700.0))))


@_in_double(functools.partial(F.gelu, approximate="tanh"))
def gelu_tanh(x: Tensor) -> Tensor:
    """Return x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))) / 2."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + tanh(inner))


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate a polynomial by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _sine_of_quarters(x: Tensor, ahead: int) -> Tensor:
    """Return sin(x + ahead π/2)."""
    quarters = (x * (2 / math.pi)).round()
    rest = x
    for part in _HALF_PI:
        rest = rest - quarters * part
    square = rest * rest
    sine = rest * _polynomial(square, _SIN_TERMS)
    cosine = _polynomial(square, _COS_TERMS)
    place = (quarters.nan_to_num().long() + ahead) % 4
    value = torch.where(place % 2 == 0, sine, cosine)
    return torch.where(place < 2, value, -value)
