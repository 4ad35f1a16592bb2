"""The gradient of an embedding table: exact sums in a fixed order, by the kernel and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels.embedding import CHUNK, embedding_gradient, sum_by_id_, zeros


def problem(tokens: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gradients and ids: half of the tokens have one id, and some are outside the table."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(rows + 2, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = rows // 2
    return torch.randn(tokens, size, generator=generator).to(device, dtype), ids.to(device)


def exact(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    inside = ids < rows
    sums = torch.zeros(rows, dy.shape[1], dtype=torch.float64, device=dy.device)
    return sums.index_add_(0, ids[inside], dy[inside].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 8, 1030])
@pytest.mark.parametrize("tokens", [1, CHUNK, 5 * CHUNK + 3])
def test_the_kernel_sums_in_fp32(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    dy, ids = problem(tokens, 11, size, dtype, device)
    out = torch.zeros(11, size, device=device)
    sum_by_id_(dy, ids, out)
    torch.testing.assert_close(out, exact(dy, ids, 11).float(), rtol=1e-5, atol=2e-5)
    again = torch.zeros_like(out)
    sum_by_id_(dy, ids, again)
    assert torch.equal(out, again)
    earlier = torch.randn_like(out)
    expected = earlier + out
    sum_by_id_(dy, ids, earlier, add=True)
    assert torch.equal(earlier, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zeros_of_any_size(dtype: torch.dtype) -> None:
    assert torch.equal(zeros(3, 7, dtype, torch.device("cpu")), torch.zeros(3, 7, dtype=dtype))


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_sums_in_fp32_and_rounds_once(place: str, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 200):
        dy, ids = problem(tokens, 11, 40, dtype, torch.device(place))
        sums = exact(dy, ids, 11)
        torch.testing.assert_close(embedding_gradient(dy, ids, 11, torch.float32), sums.float(), rtol=1e-5, atol=2e-5)
        rounded = embedding_gradient(dy, ids, 11, torch.bfloat16)
        assert rounded.dtype == torch.bfloat16
        assert ((rounded - sums).abs() <= 2.0**-8 * sums.abs() + 2e-5).all()
