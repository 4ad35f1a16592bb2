"""Attention over two sets of keys from the attention over each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels.merge import launch, merge_attention


def attention(scores_QTK: Tensor, v_KQD: Tensor) -> tuple[Tensor, Tensor]:
    lse_QT = scores_QTK.logsumexp(-1)
    weights = torch.exp(scores_QTK - lse_QT[..., None]).nan_to_num(0.0)
    return torch.einsum("qtk,kqd->tqd", weights, v_KQD), lse_QT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 1), (45, 3, 24), (3000, 4, 64), (7, 5, 192), (0, 2, 8)])
def test_both_sets_at_once(device: torch.device, tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
    """The rows are part of a longer tensor, which keeps the others; some queries have no key in a set, or in none."""
    torch.manual_seed(0)
    scores = 5 * torch.randn(heads, tokens, 9, dtype=torch.float64, device=device)
    scores[:, ::3, :4] = float("-inf")
    scores[:, ::5, 4:] = float("-inf")
    v = torch.randn(9, heads, size, dtype=torch.float64, device=device)
    whole, whole_lse = attention(scores, v)
    (first, first_lse), (second, second_lse) = attention(scores[..., :4], v[:4]), attention(scores[..., 4:], v[4:])
    part = second.to(dtype)
    for merge in (launch, merge_attention):
        out = torch.full((tokens + 4, heads, size), 7.0, device=device)
        lse = torch.full((heads, tokens + 4), 7.0, device=device)
        rows = slice(3, tokens + 3)
        out[rows], lse[:, rows] = first, first_lse
        merge(out[rows], lse[:, rows], part, second_lse.float())
        rounded = (part.double() - second).abs()
        assert (out[rows] - whole).abs().le(rounded + 4e-6 * (1 + second.abs() + whole.abs())).all()
        torch.testing.assert_close(lse[:, rows].double(), whole_lse, rtol=1e-6, atol=1e-6)
        for x, others in ((out, torch.cat((out[:3], out[-1:]))), (lse, torch.cat((lse[:, :3], lse[:, -1:]), 1))):
            assert x.isnan().sum() == 0
            assert (others == 7).all()


def test_fp64() -> None:
    scores, v = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(6, 2, 3, dtype=torch.float64)
    (out, lse), part = attention(scores[..., :2], v[:2]), attention(scores[..., 2:], v[2:])
    merge_attention(out, lse, *part)
    torch.testing.assert_close((out, lse), attention(scores, v), rtol=1e-13, atol=1e-13)
