"""The kernels give the numbers of the torch code beside them, which the tests of experts compare to the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import float8


@pytest.fixture
def both(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Call a function with the kernels and without them.

    The interpreter of Triton 3.6 rounds numbers to FP8 wrongly, so there the results stay in fp32.
    """
    if device.type == "cpu":
        monkeypatch.setattr(float8, "FLOAT8", torch.float32)

    def call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
        found = []
        for by_kernel in (True, False):
            monkeypatch.setattr(float8, "has_triton", lambda x, by_kernel=by_kernel: by_kernel)
            found.append(function(*arguments))
        return found[0], found[1]

    return call


def assert_same_numbers(found: Tensor, expected: Tensor) -> None:
    """Bit for bit but for the sign of zero."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 16, 300])
@pytest.mark.parametrize("block", [64, float8._MAX_BLOCK])
def test_rows(
    both: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int,
    block: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    monkeypatch.setattr(float8, "_MAX_BLOCK", block)
    x = torch.randn(2, 5, size, device=device) * torch.logspace(-6, 6, 5, device=device)[:, None]
    x[0, 0], x[0, 1, 0], x[0, 2, 0] = 0, 448 * 2.0**20, 449 * 2.0**20
    x = x.to(dtype)
    (q, scales), (expected, expected_scales) = both(float8.quantize_rows, x)
    assert torch.equal(scales, expected_scales)
    assert_same_numbers(q, expected)
    x, scales = x.float().flatten(0, 1), scales.flatten()[:, None]
    reached = (x.abs().amax(-1, keepdim=True) / scales)[1:]
    assert ((reached <= 448) & (reached > 224)).all()
    assert ((q.float().flatten(0, 1) * scales - x).abs() <= 2.0**-4 * x.abs() + 2.0**-10 * scales).all()


@pytest.mark.parametrize("counts", [[3, 0, 40, 17], [0, 0, 5, 0], [16, 16], [130], [0, 1] * 20])
@pytest.mark.parametrize("size", [16, 80])
def test_transposed_groups(both: Callable[..., Any], device: torch.device, counts: list[int], size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), size, device=device) * torch.logspace(-3, 3, sum(counts), device=device)[:, None]
    q, scales = both(float8.quantize_rows, x)[1]
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    padding = float8.PADDING
    padded = [-(-count // padding) * padding for count in counts]
    padded = torch.tensor(padded, device=device).cumsum(0, dtype=torch.int32)
    largest, expected = both(float8.scales_of_groups, scales, ends)
    assert torch.equal(largest, expected)
    positions = int(padded[-1]) + padding
    found, expected = both(float8.transpose_groups, q, scales, largest, ends, padded, positions)
    assert found.shape == (size, positions)
    assert_same_numbers(found[:, :-padding], expected[:, :-padding])
    start = first = 0
    for count, scale, end in zip(counts, largest, padded.tolist(), strict=True):
        rows, wide = x[start : start + count], found.float().t() * scale
        assert ((wide[first : first + count] - rows).abs() <= 2.0**-4 * rows.abs() + 2.0**-10 * scale).all()
        assert not wide[first + count : end].any()
        start, first = start + count, end


def test_transposed_matrices(both: Callable[..., Any], device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 48, 80, device=device).bfloat16()
    scales = both(float8.quantize_rows, x)[1][1].amax(1)
    found, expected = both(float8.quantize_transposed, x, scales)
    assert found.shape == (3, 80, 48)
    assert_same_numbers(found, expected)


@pytest.mark.parametrize(("rows", "size"), [(5, 300), (1, 2048), (0, 16)])
def test_rows_and_columns_are_scaled_in_place(
    device: torch.device, both: Callable[..., tuple[Any, Any]], rows: int, size: int
) -> None:
    torch.manual_seed(0)
    y = torch.randn(rows, size, device=device).bfloat16()
    scales = [2.0 ** torch.randint(-9, 9, (count,), device=device).float() for count in (rows, size)]
    found, expected = both(lambda: float8.scale_(y.clone(), *scales))
    assert_same_numbers(found, expected)
    assert_same_numbers(found, y.float() * scales[0][:, None] * scales[1])
