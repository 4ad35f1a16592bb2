"""Products, sums and functions whose bits do not depend on shapes or places."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_layers.kernels import elementary_functions
from parallel_layers.kernels.exact_matmul import exact_product


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
    monkeypatch.setattr("parallel_layers.kernels.exact_matmul._MAX_WEIGHT", 100)
    assert torch.equal(exact_product(x, w), whole)
    assert exact_product(x[..., :0], w[..., :0]).eq(0).all()
    assert exact_product(x, w[:, :0]).shape == (3, 4, 0)


FUNCTIONS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], float, float]] = [
    (elementary_functions.exp, torch.exp, -80.0, 80.0),
    (elementary_functions.log, torch.log, 1e-30, 3e5),
    (elementary_functions.log, torch.log, 0.9, 1.1),
    (elementary_functions.tanh, torch.tanh, -12.0, 12.0),
    (elementary_functions.tanh, torch.tanh, -1e-3, 1e-3),
    (elementary_functions.silu, torch.nn.functional.silu, -80.0, 80.0),
    (elementary_functions.gelu_tanh, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), -3.0, 10.0),
    (elementary_functions.cos, torch.cos, -1e5, 1e5),
    (elementary_functions.sin, torch.sin, -1e5, 1e5),
    (elementary_functions.sin, torch.sin, -1.0, 1.0),
]


@pytest.mark.parametrize(("ours", "theirs", "low", "high"), FUNCTIONS)
def test_functions(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], low: float, high: float
) -> None:
    """Within an ulp of fp64's, and every element alone as among others."""
    x = torch.rand(20001) * (high - low) + low
    y, truth = ours(x), theirs(x.double())
    assert y.dtype == torch.float32
    assert ((y.double() - truth).abs() <= 2.0**-23 * truth.abs() + 1e-30).all()
    picked = torch.randint(len(x), (200,)).tolist()
    assert torch.equal(torch.cat([ours(x[i : i + 1]) for i in picked]), y[picked])
    assert torch.equal(ours(x[1:]), y[1:])


def test_the_ends_of_exp_and_tanh() -> None:
    x = torch.tensor([-float("inf"), -1e4, 0.0])
    assert elementary_functions.exp(x).tolist() == [0.0, 0.0, 1.0]
    assert elementary_functions.tanh(torch.tensor([-1e4, 0.0, 1e4])).tolist() == [-1.0, 0.0, 1.0]
    assert elementary_functions.exp(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 64, 1000])
def test_tree_sum(size: int) -> None:
    x = torch.randn(6, size)
    total = elementary_functions.tree_sum(x)
    torch.testing.assert_close(total, x.sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.stack([elementary_functions.tree_sum(row) for row in x]), total)
