"""Importance weights against their definition in Python floats, and what they do to a loss's gradient."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from rl_models.losses import importance_weights, ppo_clip, rollout_mismatch
from rl_models.losses.importance import BOUNDS, LEVELS

LENGTHS = [4, 1, 3, 5]
MASK = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)


def draw(seed: int, spread: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(13, generator=generator, dtype=torch.float64)
    return rollout + spread * torch.randn(13, generator=generator, dtype=torch.float64), rollout


def plain_weight(
    ratios: list[float], own: float, level: str, bound: str, cap: float, floor: float, veto: float = 0.0
) -> float:
    if min(ratios) < veto:
        return 0.0
    product = math.prod(ratios)
    ratio = {"token": own, "sequence": product, "geometric": product ** (1 / len(ratios))}[level]
    if bound == "mask":
        return ratio if floor <= ratio <= cap else 0.0
    return min(ratio, cap)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("level", LEVELS)
@given(seed=st.integers(0, 10**6), cap=st.floats(0.6, 3), veto=st.sampled_from([0.0, 0.2, 0.5]))
def test_weights_and_metrics_equal_the_definition(level: str, bound: str, seed: int, cap: float, veto: float) -> None:
    old, rollout = draw(seed)
    floor = 0.5 if bound == "mask" else 0.0
    bounds = {"level": level, "bound": bound, "cap": cap, "floor": floor, "veto": veto}
    found = importance_weights(old, rollout, MASK, LENGTHS, **bounds)
    expected, outside, start = list[float](), 0, 0
    vetoed, rejected = list[bool](), list[bool]()
    for length in LENGTHS:
        places = [t for t in range(start, start + length) if MASK[t]]
        ratios = [math.exp(float(old[t] - rollout[t])) for t in places]
        weights = [plain_weight(ratios, own, level, bound, cap, floor, veto) for own in ratios]
        expected += weights
        if ratios:
            vetoed.append(min(ratios) < veto)
            rejected.append(not any(weights))
        for own in ratios:
            kept = plain_weight(ratios, own, level, "mask", cap, floor)
            outside += kept == 0
        start += length
    assert found.weights[MASK].tolist() == pytest.approx(expected, rel=1e-9)
    squares = sum(weight**2 for weight in expected)
    size = sum(expected) ** 2 / (len(expected) * squares) if squares else 0.0
    assert found.metrics == pytest.approx(
        {
            "importance_outside": outside / len(expected),
            "importance_vetoed": sum(vetoed) / len(vetoed),
            "importance_rejected": sum(rejected) / len(rejected),
            "importance_sample_size": size,
        },
        rel=1e-9,
    )


@pytest.mark.parametrize(("level", "bound"), [("token", "truncate"), ("geometric", "mask"), ("sequence", "truncate")])
def test_weights_scale_the_gradient_and_have_none(level: str, bound: str) -> None:
    old, rollout = (tensor.requires_grad_() for tensor in draw(3))
    weights, _ = importance_weights(old, rollout, MASK, LENGTHS, level=level, bound=bound, cap=1.5)
    assert not weights.requires_grad
    new = old.detach().clone().requires_grad_()
    terms = ppo_clip(new, old.detach(), torch.linspace(-1, 1, 13, dtype=torch.float64))
    (plain,) = torch.autograd.grad(terms.loss.sum(), new, retain_graph=True)
    weighted = terms.weighted(weights)
    found = torch.autograd.grad(weighted.loss.sum(), (new, old, rollout), allow_unused=True)
    torch.testing.assert_close(found[0], weights * plain)
    assert found[1:] == (None, None)
    assert torch.equal(weighted.metrics["weight"], weights)


def test_ratios_without_end_are_bounded() -> None:
    far = torch.tensor([0.0, 1e4, -1e4])
    arguments = torch.zeros(3), far, torch.tensor([False, True, True]), [3]
    assert importance_weights(*arguments).weights.tolist() == [1, 0, 2]
    masked = importance_weights(*arguments, bound="mask", floor=0.5)
    assert masked.weights.tolist() == [1, 0, 0]
    rejected = {"importance_vetoed": 0.0, "importance_rejected": 1.0}
    assert masked.metrics == {"importance_outside": 1.0, "importance_sample_size": 0.0} | rejected


def test_the_mismatch_is_measured_on_the_drawn_tokens() -> None:
    old, rollout = draw(1)
    differences = [float(rollout[t] - old[t]) for t in range(13) if MASK[t]]
    expected = {
        "rollout_difference": max(map(abs, differences)),
        "rollout_difference_mean": sum(map(abs, differences)) / len(differences),
        "rollout_kl": sum(math.exp(-x) - 1 + x for x in differences) / len(differences),
    }
    assert rollout_mismatch(old, rollout, MASK) == pytest.approx(expected, rel=1e-9)


def test_measures_of_no_drawn_token_are_zero() -> None:
    """A rank whose responses are all on other ranks has none."""
    none = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    assert set(rollout_mismatch(*none).values()) == {0.0}
    assert set(importance_weights(*none, [2]).metrics.values()) == {0.0}


def test_mistakes_are_refused() -> None:
    tensors = torch.zeros(2), torch.zeros(2), torch.tensor([False, True])
    for options, message in (
        ({"cap": 0}, "cap=0 must be positive"),
        ({"level": "word"}, "unknown level 'word'; known: token, sequence, geometric"),
        ({"bound": "clip"}, "unknown bound 'clip'; known: truncate, mask"),
        ({"veto": 1.0}, r"veto=1.0 must lie in \[0, 1\)"),
        ({"floor": 0.5}, "be 0 where ratios are truncated"),
        ({"floor": 3.0, "bound": "mask"}, r"floor=3.0 must lie in \[0, cap=2.0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            importance_weights(*tensors, [2], **options)
    with pytest.raises(ValueError, match=r"one shape.*rollout_log_probs\(2, 1\)"):
        importance_weights(tensors[0], torch.zeros(2, 1), tensors[2], [2])
