from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels.top_weights import top_weights
from parallel_layers.moe import MoEConfig, route


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "size", "k"), [(7, 128, 8), (33, 8, 2), (3, 5, 5), (0, 8, 2)])
def test_weights_and_gradient_per_element(
    device: torch.device, tokens: int, size: int, k: int, normalize: bool, scoring: str
) -> None:
    torch.manual_seed(1)
    config = MoEConfig(
        num_experts=size, top_k=k, intermediate_size=4, scoring=scoring, normalize_top_k=normalize,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    logits = (3 * torch.randn(tokens, size, device=device)).requires_grad_()
    dy = torch.randn(tokens, k, device=device)
    wide = logits.detach().double().requires_grad_()
    truth = route(wide, config)
    weights = top_weights(logits, truth.experts, scoring == "softmax", normalize, 2.5)
    torch.testing.assert_close(weights, truth.weights.float(), rtol=2e-6, atol=1e-7)
    (found,), (expected,) = (
        torch.autograd.grad(w, [x], d) for w, x, d in ((weights, logits, dy), (truth.weights, wide, dy.double()))
    )
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_chosen_scores_of_zero(device: torch.device, scoring: str) -> None:
    """As experts that a bias chose have: weights of zero and finite gradients."""
    logits = torch.tensor([[0.0, -200.0, -200.0]], device=device).requires_grad_()
    experts = torch.tensor([[1, 2]], device=device)
    weights = top_weights(logits, experts, scoring == "softmax", True, 1.0)
    assert weights.tolist() == [[0.0, 0.0]]
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert gradient.isfinite().all()
