"""The attention of exact products: the reference's numbers and gradients, and the same bits in every pack."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.attention import reference
from parallel_layers.attention.packed import packed_attention

LENGTHS, LENGTHS_K = [5, 0, 1, 9, 3], [7, 2, 1, 9, 0]
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 3},
    "window both ways": {"window": 2, "causal": False},
    "softcap": {"softcap": 1.5, "scale": 0.7},
}


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def operands(total: int, total_k: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (total, 4, 12), (total_k, 2, 12), (total_k, 2, 8)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, dtype: torch.dtype) -> None:
    """With other keys than queries, segments without either, and values of another size."""
    leaves = operands(sum(LENGTHS), sum(LENGTHS_K), dtype)
    options = {"cu_seqlens_k": bounds(LENGTHS_K), "max_seqlen_k": 9, **CASES[case]}
    seed = torch.randn(sum(LENGTHS), 4, 8).to(dtype)
    results = []
    for backend in ("exact", "reference"):
        out = packed_attention(*leaves, bounds(LENGTHS), 9, backend=backend, **options)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, seed)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_keys_that_are_not_there_yet() -> None:
    q, k, v = (x.detach() for x in operands(2, 12, torch.float32))
    options = {"cu_seqlens_k": bounds([6, 6]), "max_seqlen_k": 6, "used_k": torch.tensor([4, 0]).int()}
    arguments = q, k, v, bounds([1, 1]), 1
    ours, theirs = (packed_attention(*arguments, backend=name, **options) for name in ("exact", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert ours[1].eq(0).all()


@pytest.mark.parametrize("case", CASES)
def test_a_segment_and_a_head_have_their_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in operands(sum(LENGTHS), sum(LENGTHS), torch.float32))
    whole = packed_attention(q, k, v, bounds(LENGTHS), 9, backend="exact", **CASES[case])
    monkeypatch.setattr(reference, "_MAX_EXACT_SCORES", 20)  # other blocks of queries
    assert torch.equal(packed_attention(q, k, v, bounds(LENGTHS), 9, backend="exact", **CASES[case]), whole)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = packed_attention(q[rows], k[rows], v[rows], bounds([length]), length, backend="exact", **CASES[case])
        assert torch.equal(alone, whole[rows])
        start += length
    half = packed_attention(q[:, 2:], k[:, 1:], v[:, 1:], bounds(LENGTHS), 9, backend="exact", **CASES[case])
    assert torch.equal(half, whole[:, 2:])
