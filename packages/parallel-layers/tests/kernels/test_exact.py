"""Products, sums and functions whose bits do not depend on shapes or places."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from parallel_layers.kernels.exact import exact_product, in_double


def wide_range(*shape: int) -> Tensor:
    """Numbers of magnitudes from 1e-6 to 1e6, some of them zero."""
    x = torch.randn(shape) * 10.0 ** torch.randint(-6, 7, shape)
    return torch.where(torch.rand(shape) < 0.1, 0.0, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_product_is_rounded_once(size: int, dtype: torch.dtype) -> None:
    x, w = wide_range(7, size).to(dtype), wide_range(5, size).to(dtype)
    truth = x.double() @ w.double().T
    bound = x.double().abs().amax(1)[:, None] * w.double().abs().amax(1) * 2.0**-36
    assert ((exact_product(x, w).double() - truth).abs() <= truth.abs() * 2.0**-24 + bound).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 300), st.integers(0, 2**31))
def test_every_part_of_a_product_has_its_bits(rows: int, columns: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, w = wide_range(rows, size), wide_range(columns, size)
    whole = exact_product(x, w)
    row, column = int(torch.randint(rows, ())), int(torch.randint(columns, ()))
    assert torch.equal(exact_product(x[row:], w[: column + 1]), whole[row:, : column + 1])
    assert torch.equal(exact_product(x[row : row + 1], w[column : column + 1])[0, 0], whole[row, column])
    order = torch.randperm(size)
    assert torch.equal(exact_product(x[:, order], w[:, order]), whole)


def test_weights_that_are_split_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3, 4, 16), torch.randn(3, 9, 16)
    whole = exact_product(x, w)
    monkeypatch.setattr("parallel_layers.kernels.exact._MAX_WEIGHT", 100)
    assert torch.equal(exact_product(x, w), whole)
    assert exact_product(x[..., :0], w[..., :0]).eq(0).all()
    assert exact_product(x, w[:, :0]).shape == (3, 4, 0)


FUNCTIONS: list[tuple[Callable[[Tensor], Tensor], float, float]] = [
    (torch.exp, -80.0, 80.0),
    (torch.log, 1e-30, 3e5),
    (torch.log, 0.9, 1.1),
    (torch.tanh, -12.0, 12.0),
    (torch.nn.functional.silu, -80.0, 80.0),
    (partial(torch.nn.functional.gelu, approximate="tanh"), -3.0, 10.0),
    (torch.cos, -1e5, 1e5),
    (torch.sin, -1e5, 1e5),
]


@pytest.mark.parametrize(("function", "low", "high"), FUNCTIONS)
def test_functions(function: Callable[[Tensor], Tensor], low: float, high: float) -> None:
    """Every element alone has the bits that it has among others."""
    torch.manual_seed(0)
    x = torch.rand(20001) * (high - low) + low
    y = in_double(function, x)
    assert torch.equal(y, function(x.double()).float())
    picked = torch.randint(len(x), (200,)).tolist()
    assert torch.equal(torch.cat([in_double(function, x[i : i + 1]) for i in picked]), y[picked])
    assert torch.equal(in_double(function, x[1:]), y[1:])
