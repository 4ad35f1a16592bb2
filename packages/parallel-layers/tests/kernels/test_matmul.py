"""The product with one order of summation for every shape: against fp64, and bit for bit against itself."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import matmul
from parallel_layers.kernels.matmul import invariant_matmul, supports_matmul

SHAPES = [(5, 8, 64), (130, 264, 72), (129, 257, 200), (1, 1, 8), (256, 512, 4096)]


@pytest.fixture
def small_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter small tiles, so that small shapes do not divide them either."""
    if device.type == "cpu":
        monkeypatch.setattr(matmul, "BLOCK_M", 16)
        monkeypatch.setattr(matmul, "BLOCK_N", 32)


def operands(device: torch.device, rows: int, columns: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(rows, size, device=device), torch.randn(columns, size, device=device) / math.sqrt(size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter cannot multiply bf16
    return x.to(dtype), w.to(dtype), torch.randn(columns, device=device).to(dtype)


def cases(device: torch.device) -> list[tuple[int, int, int]]:
    return SHAPES if device.type == "cuda" else [(5, 8, 64), (18, 40, 72), (17, 33, 136)]


def assert_close(actual: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, unit: float) -> None:
    truth = x.double() @ w.double().T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ w.double().abs().T + 1
    assert ((actual.double() - truth).abs() <= unit * truth.abs() + 2e-6 * scale).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bias", [False, True])
def test_against_fp64(device: torch.device, bias: bool) -> None:
    for shape in cases(device):
        x, w, b = operands(device, *shape)
        b = b if bias else None
        y = invariant_matmul(x, w, b)
        assert y.dtype == x.dtype
        assert_close(y, x, w, b, 2.0**-8 if device.type == "cuda" else 2.0**-10)
        wide = invariant_matmul(x, w, b, dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert_close(wide, x, w, b, 2.0**-23)


@pytest.mark.usefixtures("small_tiles")
def test_a_tree_of_leaves(device: torch.device) -> None:
    """Four leaves here are two and two, and four times one, on as many ranks."""
    shapes = (
        [(5, 8, 64), (17, 33, 128)]
        if device.type == "cpu"
        else [(130, 264, 4096), (1, 9, 448), (129, 256, 192), (130, 257, 256)]
    )
    for rows, columns, size in shapes:
        x, w, bias = operands(device, rows, columns, size)
        whole = invariant_matmul(x, w, bias, leaves=4, in_tree=True, dtype=torch.float32)
        assert_close(whole, x, w, bias, 2.0**-23)
        for ranks in (2, 4):
            parts = [
                invariant_matmul(a, b, leaves=4 // ranks, in_tree=True, dtype=torch.float32)
                for a, b in zip(x.chunk(ranks, 1), w.chunk(ranks, 1), strict=True)  # strided
            ]
            while len(parts) > 1:
                parts = [left + right for left, right in list(pairwise(parts))[::2]]
            assert torch.equal(parts[0] + bias.float(), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("leaves", [1, 4])
def test_rows_and_columns_depend_on_nothing_else(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on a GPU only: in the interpreter BLAS multiplies the tiles and a row's bits depend on its place in one."""
    rows, columns, size = 519, 1027, 4096
    x, w, bias = operands(torch.device("cuda"), rows, columns, size)
    whole = invariant_matmul(x, w, bias, leaves=leaves)
    for first, last in ((0, 1), (3, 20), (rows - 1, rows), (5, rows)):
        assert torch.equal(invariant_matmul(x[first:last], w, bias, leaves=leaves), whole[first:last])
    for first, last in ((0, columns // 2), (columns // 2, columns), (columns - 1, columns)):
        part = invariant_matmul(x, w[first:last], bias[first:last], leaves=leaves)
        assert torch.equal(part, whole[:, first:last])
    monkeypatch.setattr(matmul, "num_multiprocessors", lambda device: 3)
    assert torch.equal(invariant_matmul(x, w, bias, leaves=leaves), whole)


@pytest.mark.gpu
def test_rows_that_were_expanded() -> None:
    x, w, bias = operands(torch.device("cuda"), 1, 64, 128)
    many = x.expand(300, -1)
    assert torch.equal(invariant_matmul(many, w, bias), invariant_matmul(many.contiguous(), w, bias))


@pytest.mark.gpu
def test_what_it_takes() -> None:
    x, w = torch.zeros(4, 64, device="cuda").bfloat16(), torch.zeros(8, 64, device="cuda").bfloat16()
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert supports_matmul(x, w) == hopper
    assert supports_matmul(x, w, leaf_size=16) == hopper
    assert not supports_matmul(x, w, leaf_size=8)
    assert not supports_matmul(x.float(), w.float())
    assert not supports_matmul(x[:, :12], w[:, :12])
    assert not supports_matmul(x[:0], w)
