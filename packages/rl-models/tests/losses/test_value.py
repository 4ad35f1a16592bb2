"""The clipped value loss, against its definition."""

import pytest
import torch
from hypothesis import given, strategies as st

from rl_models.losses import value_clip

small = st.floats(-3, 3, allow_nan=False)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=8), st.one_of(st.none(), st.floats(0, 1)))
def test_value_clip_equals_the_definition(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    values, old, returns = torch.tensor(rows, dtype=torch.float64).T
    terms = value_clip(values, old, returns, clip=clip)
    for t, (v, v_old, r) in enumerate(rows):
        moved = v if clip is None else v_old + min(max(v - v_old, -clip), clip)
        assert terms.loss[t].item() == pytest.approx(0.5 * max((v - r) ** 2, (moved - r) ** 2), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [
        (0.1, 0.1 - 1.0),  # inside the interval: the plain error
        (0.5, 0.0),  # already moved by more than the clip towards the return
        (-0.5, -0.5 - 1.0),  # moved away from the return: the full error pulls it back
    ],
)
def test_the_clip_stops_the_gradient_only_past_the_interval(value: float, gradient: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    terms = value_clip(values, torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    (actual,) = torch.autograd.grad(terms.loss.sum(), values)
    assert actual.item() == pytest.approx(gradient)


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        value_clip(torch.zeros(2), torch.zeros(1), torch.zeros(2))
    for clip in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="use None"):
            value_clip(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip=clip)
