"""Truncations against their definitions, and the search for a threshold over parts of a vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from parallel_layers.inference import sample, truncate
from parallel_layers.inference.truncation import _ordered, _search, _sorted_weights, _weights_above

LOGITS = st.lists(
    st.sampled_from([-math.inf, -1e30, -1.0, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 30.0]) | st.floats(-60, 60, width=32),
    min_size=1,
    max_size=24,
)
TOP_P = st.sampled_from([1e-300, 1e-9, 0.5, 1 - 1e-9, math.nextafter(1, 0)]) | st.floats(0.01, 0.99)


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.01, 1.0))
def test_truncate_keeps_the_most_likely_tokens(seed: int, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed))
    kept = truncate(logits, top_k=top_k, top_p=top_p)
    for row, kept_row in zip(logits, kept, strict=True):
        order = row.argsort(descending=True)[: min(top_k, 10)]
        probability = row[order].softmax(0)
        count = next(
            n for n in range(1, len(order) + 1) if probability[:n].sum() >= min(top_p, 1) - 1e-6 or n == len(order)
        )
        allowed = set(order[:count].tolist())
        actual = set(torch.nonzero(kept_row > -torch.inf).flatten().tolist())
        if top_p == 1:
            allowed = set(order.tolist())
        # A sum that reaches p to the last bit may fall on either side.
        assert actual == allowed or abs(probability[:count].sum() - top_p) < 1e-5
        assert torch.equal(kept_row[list(actual)], row[list(actual)])


@given(st.integers(0, 1000), st.floats(1e-6, 1.0))
def test_min_p_keeps_the_tokens_near_the_most_likely_one(seed: int, min_p: float) -> None:
    logits = 3 * torch.randn(4, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ratio = logits.softmax(-1) / logits.softmax(-1).amax(-1, keepdim=True)
    kept = truncate(logits, min_p=min_p) > -torch.inf
    assert torch.equal(kept, ratio >= min_p) or ((ratio - min_p).abs() < 1e-12).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.7, "min_p": 0.01}]
)
def test_logits_of_any_dtype_and_strides_are_truncated(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    kept = truncate(logits, **options)
    assert kept.dtype == dtype
    assert torch.equal(kept > -torch.inf, truncate(logits.double().contiguous(), **options) > -torch.inf)
    tokens, log_probs = sample(logits, torch.full((3,), 0.9), **options)
    expected = sample(logits.double(), torch.full((3,), 0.9), **options)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(log_probs, expected[1])


def kept_of_parts(logits: Tensor, cuts: list[int], top_p: float, temperature: float) -> Tensor:
    """Return which tokens are kept by a search that adds the weights of parts of the vocabulary."""
    integers = torch.int64 if logits.dtype == torch.float64 else torch.int32
    highest, least = logits.amax(-1), torch.full_like(logits[:, 0], -math.inf)
    parts = [_sorted_weights(part.contiguous(), highest, least, temperature) for part in logits.tensor_split(cuts, 1)]

    def measure(low: Tensor, shift: int) -> Tensor:
        return torch.stack([_weights_above(*part, low, shift) for part in parts]).sum(0)

    low = torch.full((len(logits),), torch.iinfo(integers).min, dtype=integers)
    return logits >= _ordered(_search(measure, low, top_p, torch.clone)).view(logits.dtype)[:, None]


@given(LOGITS, TOP_P, st.floats(0.05, 5), st.lists(st.integers(1, 24), min_size=1, max_size=3), st.booleans())
@example([0.0] * 8, 0.5, 1.0, [3], False)
@example([1.0, 1.0000001], 0.3, 1.0, [1], False)
@example([1.0] + [-60.0] * 20, math.nextafter(1, 0), 1.0, [1, 20], False)
@example([-math.inf, 5.0, -math.inf], 1e-300, 1.0, [1], True)
def test_the_kept_tokens_are_the_fewest_that_reach_p_however_the_vocabulary_is_divided(
    row: list[float], top_p: float, temperature: float, cuts: list[int], double: bool
) -> None:
    """The kept tokens have the probability p, and without the least likely of them they do not."""
    logits = torch.tensor([row], dtype=torch.float64 if double else torch.float32)
    if logits.amax() == -math.inf:
        return
    whole = kept_of_parts(logits, [len(row)], top_p, temperature)
    assert torch.equal(kept_of_parts(logits, sorted(cuts), top_p, temperature), whole)
    kept, likely = whole[0] & (logits[0] > -math.inf), logits[0].amax()
    assert kept[logits[0] == likely].all()
    # The weights are rounded down to 2^-40 of the largest.
    probability = (logits[0].double() / temperature).softmax(0)
    assert probability[kept].sum() >= top_p - 1e-9
    least = logits[0][kept].amin()
    assert torch.equal(kept, logits[0] >= least)
    fewer = kept & (logits[0] > least)
    assert probability[fewer].sum() < top_p + 1e-9 or not fewer.any()
    if temperature == 1:
        assert torch.equal(truncate(logits, top_p=top_p)[0] > -math.inf, kept)
