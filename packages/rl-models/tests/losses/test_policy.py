"""PPO's clipped surrogate and the entropy bonus, against their definitions written out with Python floats."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rl_models.losses import LossTerms, cispo, dro, entropy_bonus, gspo_clip, ppo_clip, sapo

small = st.floats(-3, 3, allow_nan=False)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=8), st.floats(0, 0.5), st.floats(0, 0.5))
def test_ppo_clip_equals_the_definition(rows: list[tuple[float, float, float]], low: float, high: float) -> None:
    new, old, advantage = torch.tensor(rows, dtype=torch.float64).T
    terms = ppo_clip(new, old, advantage, clip_low=low, clip_high=high)
    for t, (lp, old_lp, a) in enumerate(rows):
        ratio = math.exp(lp - old_lp)
        clipped = min(max(ratio, 1 - low), 1 + high)
        assert terms.loss[t].item() == pytest.approx(-min(ratio * a, clipped * a), rel=1e-9, abs=1e-12)
        assert terms.metrics["approx_kl"][t].item() == pytest.approx(ratio - 1 - (lp - old_lp), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "has_gradient"),
    [(0.0, 1.0, True), (0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)],
)
def test_the_clip_stops_the_gradient_only_outside_the_trust_interval(
    log_ratio: float, advantage: float, has_gradient: bool
) -> None:
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    terms = ppo_clip(new, old, torch.tensor([advantage], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    assert gradient.item() == pytest.approx(-advantage * math.exp(log_ratio) if has_gradient else 0.0)
    assert terms.metrics["clip_fraction"].item() == float(not has_gradient)


BEYOND = math.exp(20)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual_clip", "term", "gradient", "clipped"),
    [
        (100.0, 1.0, None, -1.2, 0.0, 1.0),
        (1e4, 1.0, 3.0, -1.2, 0.0, 1.0),
        (100.0, -1.0, 3.0, 3.0, 0.0, 1.0),
        (100.0, -1.0, None, BEYOND, 0.0, 1.0),
        (19.0, -1.0, None, math.exp(19), math.exp(19), 0.0),
        (100.0, 0.0, None, 0.0, 0.0, 0.0),
        (100.0, 0.0, 3.0, 0.0, 0.0, 0.0),
        (-100.0, 1.0, None, 0.0, 0.0, 0.0),
        (-100.0, -1.0, None, 0.8, 0.0, 1.0),
        (-1e4, -1.0, 3.0, 0.8, 0.0, 1.0),
    ],
)
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_terms_and_gradients_are_finite_however_far_the_policy_has_gone(
    kind: str,
    log_ratio: float,
    advantage: float,
    dual_clip: float | None,
    term: float,
    gradient: float,
    clipped: float,
) -> None:
    new = torch.tensor([log_ratio], requires_grad=True)
    old, advantages = torch.zeros(1), torch.tensor([advantage])
    if kind == "ppo":
        terms = ppo_clip(new, old, advantages, dual_clip=dual_clip)
    elif dual_clip is None:
        terms = gspo_clip(new, old, advantages, torch.tensor([True]), [1], clip_low=0.2, clip_high=0.2)
    else:
        return
    (found,) = torch.autograd.grad(terms.loss.sum(), new)
    assert (terms.loss.item(), found.item()) == pytest.approx((term, gradient))
    assert terms.metrics["clip_fraction"].item() == clipped
    assert terms.metrics["approx_kl"].isfinite().all()


def test_gspo_clips_all_tokens_of_a_sequence_or_none() -> None:
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(200)
    for _ in range(20):
        old = -6 * torch.rand(200, generator=generator)
        new = old + 0.3 * torch.randn(200, generator=generator)
        # The sequence's ratio comes to lie at the bound, to the precision of a float.
        new = new - (new - old).mean() + 4e-4
        terms = gspo_clip(new, old, ones, ones, [200])  # a mask of ones serves, too
        assert len(terms.loss.unique()) == 1
        assert len(terms.metrics["clip_fraction"].unique()) == 1


@pytest.mark.parametrize("lengths", [(3,), (1,), (-1, 3)])
def test_gspo_refuses_lengths_that_are_not_the_batchs(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be non-negative and add up to the 2 tokens given"):
        gspo_clip(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.tensor([False, True]), lengths)


def test_terms_add_and_scale_and_refuse_a_metric_reported_twice() -> None:
    entropy = torch.tensor([0.5, 2.0])
    policy = ppo_clip(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]))
    both = policy + 2.0 * entropy_bonus(entropy, 0.1)
    assert torch.allclose(both.loss, torch.tensor([-1.0, 1.0]) - 0.2 * entropy)
    assert set(both.metrics) == {"clip_fraction", "approx_kl", "entropy"}
    with pytest.raises(ValueError, match="approx_kl"):
        policy + policy
    assert isinstance(both, LossTerms)


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape.*old_log_probs\(2, 1\)"):
        ppo_clip(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"dual_clip=1\.0 must be above 1"):
        ppo_clip(torch.zeros(2), torch.zeros(2), torch.zeros(2), dual_clip=1.0)
    for clip in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"clip_low={clip} .* must not be negative"):
            ppo_clip(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip_low=clip)


@given(st.lists(st.tuples(small, small), min_size=1, max_size=8), st.floats(1.01, 5))
def test_dual_clip_bounds_the_term_of_negative_advantages(rows: list[tuple[float, float]], bound: float) -> None:
    log_ratio, advantage = torch.tensor(rows, dtype=torch.float64).T
    terms = ppo_clip(log_ratio, torch.zeros_like(log_ratio), advantage, dual_clip=bound)
    for t, (lr, a) in enumerate(rows):
        ratio = math.exp(lr)
        surrogate = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        expected = max(surrogate, bound * a) if a < 0 else surrogate
        assert terms.loss[t].item() == pytest.approx(-expected, rel=1e-9, abs=1e-12)


def test_gspo_is_the_sequence_objective_and_has_its_gradient() -> None:
    torch.manual_seed(0)
    lengths = [4, 1, 5, 3]
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    old = torch.randn(13, dtype=torch.float64)
    new = (old + 0.1 * torch.randn(13, dtype=torch.float64)).requires_grad_()
    scores = torch.tensor([1.0, 9.0, -1.0, 0.5], dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    low, high = 0.02, 0.03
    terms = gspo_clip(new, old, scores[sequence], mask, lengths, clip_low=low, clip_high=high)
    counts = torch.stack([mask[sequence == n].sum() for n in range(4)])
    (actual,) = torch.autograd.grad((terms.loss * mask / counts.clamp(min=1)[sequence]).sum(), new)
    objective = new.new_zeros(())
    for n in (0, 2, 3):  # sequence 1 has no action
        here = (sequence == n) & mask
        ratio = (new[here] - old[here]).mean().exp()
        objective = objective - torch.minimum(ratio * scores[n], ratio.clamp(1 - low, 1 + high) * scores[n])
    (expected,) = torch.autograd.grad(objective, new)
    torch.testing.assert_close((terms.loss.detach() * mask / counts.clamp(min=1)[sequence]).sum(), objective.detach())
    torch.testing.assert_close(actual, expected)
    assert 0 < terms.metrics["clip_fraction"][mask].mean() < 1


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=8), st.floats(0, 1), st.floats(0, 4))
def test_cispo_weighs_the_gradient_of_every_token(
    rows: list[tuple[float, float, float]], low: float, high: float
) -> None:
    new, old, advantage = torch.tensor(rows, dtype=torch.float64).T
    new = new.clone().requires_grad_()
    terms = cispo(new, old, advantage, clip_low=low, clip_high=high)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    for t, (lp, old_lp, a) in enumerate(rows):
        ratio = math.exp(lp - old_lp)
        weight = min(max(ratio, 1 - low), 1 + high)
        assert terms.loss[t].item() == pytest.approx(-weight * a * lp, rel=1e-9, abs=1e-12)
        assert gradient[t].item() == pytest.approx(-weight * a, rel=1e-9, abs=1e-12)
        clipped = weight != pytest.approx(ratio, rel=1e-12)
        if clipped or weight == ratio:  # between them, a bound is within rounding errors of the ratio
            assert terms.metrics["clip_fraction"][t].item() == clipped


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=8), st.floats(0.1, 3), st.floats(0.1, 3))
def test_sapo_gates_the_ratio(rows: list[tuple[float, float, float]], positive: float, negative: float) -> None:
    new, old, advantage = torch.tensor(rows, dtype=torch.float64).T
    new = new.clone().requires_grad_()
    terms = sapo(new, old, advantage, temperature=positive, negative_temperature=negative)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    for t, (lp, old_lp, a) in enumerate(rows):
        ratio, tau = math.exp(lp - old_lp), positive if a > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert terms.loss[t].item() == pytest.approx(-4 / tau * gate * a, rel=1e-9, abs=1e-12)
        assert gradient[t].item() == pytest.approx(-4 * gate * (1 - gate) * ratio * a, rel=1e-7, abs=1e-12)
        assert terms.metrics["gate"][t].item() == pytest.approx(4 * gate * (1 - gate), rel=1e-7, abs=1e-12)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=8), st.floats(0.01, 5))
def test_dro_regresses_the_log_ratio_on_the_advantage(rows: list[tuple[float, float, float]], beta: float) -> None:
    new, old, advantage = torch.tensor(rows, dtype=torch.float64).T
    new = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(dro(new, old, advantage, beta=beta).loss.sum(), new)
    plain = new.detach().clone().requires_grad_()
    squared = (advantage - beta * (plain - old)).square() / (2 * beta)
    torch.testing.assert_close(gradient, torch.autograd.grad(squared.sum(), plain)[0])
    terms = dro(new, old, advantage, beta=beta).loss
    torch.testing.assert_close(terms, squared - advantage.square() / (2 * beta), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [cispo, sapo])
def test_the_further_losses_are_finite_however_far_the_policy_has_gone(loss: Any) -> None:
    new = torch.tensor([100.0, -100.0, 1e4, 0.0], requires_grad=True)
    for sign in (1.0, -1.0):
        terms = loss(new, torch.zeros(4), torch.full((4,), sign))
        (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
        assert torch.stack([terms.loss, gradient, *terms.metrics.values()]).isfinite().all()
        assert gradient[3].item() == pytest.approx(-sign)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: cispo(x, x, x, clip_high=-1.0), "clip_high=-1.0 must not be negative"),
        (lambda x: sapo(x, x, x, temperature=0.0), "temperature=0.0 and negative_temperature=1.05 must be positive"),
        (lambda x: dro(x, x, x, beta=0.0), "beta=0.0 must be positive"),
        (lambda x: dro(x, x, x[:, None]), r"one shape.*advantages\(2, 1\)"),
    ],
)
def test_mistakes_of_the_further_losses_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2))
