"""The k1, k2, k3 estimators: their values, and the expectations that their names promise."""

import math

import pytest
import torch

from rl_models.losses import kl_penalty


@pytest.mark.parametrize("l", [-2.0, -0.1, 0.0, 0.3, 2.0])
def test_values(l: float) -> None:  # noqa: E741
    new, reference = torch.tensor([l - 1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    assert kl_penalty(new, reference, "k1").item() == pytest.approx(l)
    assert kl_penalty(new, reference, "k2").item() == pytest.approx(l * l / 2)
    assert kl_penalty(new, reference, "k3").item() == pytest.approx(math.exp(-l) - 1 + l, abs=1e-12)


def test_expectations_are_exact_over_a_whole_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    reference = torch.randn(12, dtype=torch.float64).log_softmax(0)
    probability = policy.exp()
    divergence = (probability * (policy - reference)).sum()
    for unbiased in ("k1", "k3"):
        estimate = (probability * kl_penalty(policy, reference, unbiased)).sum()
        assert estimate.item() == pytest.approx(divergence.item(), abs=1e-12)
    assert (kl_penalty(policy, reference, "k3") >= 0).all()
    # The gradient of k2 under samples from the policy is the gradient of the divergence.
    (true,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (k2,) = torch.autograd.grad((probability.detach() * kl_penalty(policy, reference, "k2")).sum(), logits)
    torch.testing.assert_close(k2, true)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("l", [-1e4, -100.0, -20.5, 100.0, 1e4])
def test_values_and_gradients_are_finite_however_far_the_policies_are_apart(estimator: str, l: float) -> None:  # noqa: E741
    new = torch.tensor([l], requires_grad=True)
    penalty = kl_penalty(new, torch.zeros(1), estimator)
    (gradient,) = torch.autograd.grad(penalty.sum(), new)
    expected = {"k1": (l, 1.0), "k2": (l * l / 2, l), "k3": (math.exp(20) - 21, 0.0) if l < 0 else (l - 1, 1.0)}
    assert (penalty.item(), gradient.item()) == pytest.approx(expected[estimator])


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="known: k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="one shape"):
        kl_penalty(torch.zeros(2), torch.zeros(1))
