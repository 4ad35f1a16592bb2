"""The kernels that draw tokens, against the cumulative distribution in fp64."""

from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels.sample import launch


@pytest.mark.parametrize("vocab_size", [51, 5000])
def test_draws_follow_the_cumulative_distribution(device: torch.device, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, vocab_size, device=device)
    logits[3, 10:], logits[:, -1] = -torch.inf, -torch.inf
    uniforms = torch.rand(40, device=device)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-24])
    tokens, log_probs = launch(logits, uniforms, 0.7)
    expected = (logits / 0.7).double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=5e-6)
    passed = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    assert (uniforms <= passed + 2e-6).all()
    assert (uniforms >= passed - log_probs.double().exp() - 2e-6).all()


def test_broken_rows_have_no_log_prob(device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens, log_probs = launch(logits, torch.rand(4, device=device), 1.0)
    assert log_probs.isnan().tolist() == [True, True, True, False]
    assert ((tokens >= 0) & (tokens < 300)).all()
