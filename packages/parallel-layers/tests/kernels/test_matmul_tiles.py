"""Products of few rows and of groups of rows: against fp64, and on a GPU bit for bit against `invariant_matmul`."""

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import matmul
from parallel_layers.kernels.matmul import invariant_matmul, step_of
from parallel_layers.kernels.matmul_tiles import grouped_matmul


def operands(device: torch.device, rows: int, groups: int, columns: int, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter cannot multiply bf16
    x, w = torch.randn(rows, size, device=device), torch.randn(groups, columns, size, device=device) / size**0.5
    return x.to(dtype), w.to(dtype)


@pytest.mark.parametrize(("leaves", "in_tree"), [(1, False), (1, True), (2, True), (4, True)])
def test_few_rows_have_the_bits_of_many(
    device: torch.device, leaves: int, in_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = (
        [(5, 40, 64)] if device.type == "cpu" else [(5, 40, 64), (130, 8200, 448), (64, 16400, 4096), (256, 96, 192)]
    )
    for rows, columns, size in shapes:
        x, (w,) = operands(device, rows, 1, columns, size)
        bias = torch.randn(columns, device=device).to(x.dtype)
        few = invariant_matmul(x, w, bias, leaves=leaves, in_tree=in_tree, dtype=torch.float32)
        truth = x.double() @ w.double().T + bias.double()
        torch.testing.assert_close(few.double(), truth, rtol=1e-5, atol=1e-4)
        if device.type == "cuda":
            monkeypatch.setattr(matmul, "MOST_ROWS", 0)
            assert torch.equal(few, invariant_matmul(x, w, bias, leaves=leaves, in_tree=in_tree, dtype=torch.float32))
            monkeypatch.undo()


@pytest.mark.parametrize("input_major", [False, True])
@pytest.mark.parametrize("leaves", [None, 1, 4])
def test_groups_of_rows(device: torch.device, leaves: int | None, input_major: bool) -> None:
    """Each run of rows is a product of its own; some groups have no rows."""
    shapes = [([3, 0, 9], 24, 64)] if device.type == "cpu" else [([3, 0, 9], 24, 64), ([0, 700, 1, 130], 264, 320)]
    for counts, columns, size in shapes:
        x, w = operands(device, sum(counts), len(counts), columns, size)
        block_k = step_of(size, leaves or 1, in_tree=leaves is not None)
        stored = w.transpose(1, 2).contiguous().transpose(1, 2) if input_major else w
        numbers = torch.tensor(counts, device=device)
        y = grouped_matmul(x, stored, numbers, leaves=leaves or 1, block_k=block_k, dtype=torch.float32)
        for rows, weight, found in zip(x.split(counts), w, y.split(counts), strict=True):
            torch.testing.assert_close(found.double(), rows.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
            if device.type == "cuda" and len(rows):
                options = {"leaves": leaves or 1, "in_tree": leaves is not None, "dtype": torch.float32}
                assert torch.equal(found, invariant_matmul(rows, weight, **options))
