from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels.rows import copy_rows, sum_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "top_k", "size"), [(5, 3, 300), (1, 1, 1), (4, 8, 5000), (0, 2, 8)])
def test_tokens_to_rows_and_sums_of_rows(
    device: torch.device, unit: dict[torch.dtype, float], tokens: int, top_k: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    order = torch.randperm(tokens * top_k, device=device)
    places = torch.argsort(order)
    x = torch.randn(tokens, size, device=device).to(dtype)
    assert torch.equal(copy_rows(x, places, top_k), x[order // top_k])
    rows = torch.randn(tokens * top_k, size, device=device).to(dtype)
    exact = rows.double()[places].view(tokens, top_k, size).sum(1)
    summed = sum_rows(rows, places, top_k)
    assert summed.dtype == dtype
    assert ((summed - exact).abs() <= unit[dtype] * exact.abs() + 1e-5).all()
