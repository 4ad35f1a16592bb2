"""The clipped value loss, against its definition."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from rl_models.losses import label_cross_entropy, value_clip

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


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_label_cross_entropy_equals_torch(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([-100, 0, 1, -100, 1, 0])
    values = torch.randn(6, classes, dtype=torch.float64, generator=generator).requires_grad_()
    terms = label_cross_entropy(values[:, 0] if classes == 1 else values, labels)
    plain = values.detach().clone().requires_grad_()
    if classes == 1:
        expected = binary_cross_entropy_with_logits(plain[:, 0], labels.clamp(min=0).double(), reduction="none")
        largest = (plain[:, 0] > 0).long()
    else:
        expected, largest = cross_entropy(plain, labels, reduction="none"), plain.argmax(1)
    expected = torch.where(labels >= 0, expected, 0)
    torch.testing.assert_close(terms.loss, expected)
    assert torch.equal(terms.metrics["label_accuracy"], (largest == labels).double())
    weights = torch.randn(6, dtype=torch.float64, generator=generator)
    (terms.loss * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(values.grad, plain.grad)


def test_labels_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels \[3, -1\] are outside 0..2; use -100"):
        label_cross_entropy(torch.zeros(4, 3), torch.tensor([0, 3, -1, -100]))
    with pytest.raises(ValueError, match="per-token tensors must have one shape"):
        label_cross_entropy(torch.zeros(4, 3), torch.zeros(3).long())
