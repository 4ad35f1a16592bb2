from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels.top_k import top_k


@pytest.mark.parametrize(("tokens", "size", "k"), [(7, 128, 8), (33, 8, 2), (5, 5, 5), (3, 256, 8), (0, 8, 2)])
def test_the_columns_of_the_largest(device: torch.device, tokens: int, size: int, k: int) -> None:
    torch.manual_seed(1)
    scores = torch.randn(tokens, size, device=device)
    assert torch.equal(top_k(scores, k), scores.topk(k).indices)


def test_the_first_of_equal_scores_and_excluded_columns(device: torch.device) -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, float("-inf"), 1.0]], device=device)
    assert top_k(scores, 4).tolist() == [[1, 2, 0, 4]]


def test_without_numbers_the_columns_exist(device: torch.device) -> None:
    experts = top_k(torch.full((2, 6), float("nan"), device=device), 3)
    assert ((experts >= 0) & (experts < 6)).all()
