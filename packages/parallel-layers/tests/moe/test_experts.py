from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from parallel_layers import initialize_
from parallel_layers.moe import ClampedSwiGLU, GroupedExperts, grouped_linear


def by_one(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(x.device)
    return torch.einsum("mk,mnk->mn", x, weight[expert])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 5))
def test_grouped_linear_and_gradients(counts: list[int], width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), width, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(len(counts), out, width, dtype=torch.float64, generator=generator, requires_grad=True)
    results = []
    for y in (grouped_linear(x, weight, torch.tensor(counts)), by_one(x, weight, counts)):
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[3, 0, 130, 17], [0, 0, 5, 0], [64, 64, 64, 64], [0, 0, 0, 0], [1, 2, 3, 0]])
def test_grouped_kernel_and_gradients(counts: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(4, 48, 64, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(sum(counts), 48, device="cuda").bfloat16()
    y = grouped_linear(x, weight, torch.tensor(counts, device="cuda"))
    actual = (y, *torch.autograd.grad(y, (x, weight), dy))
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y64 = by_one(x64, weight64, counts)
    expected = (y64, *torch.autograd.grad(y64, (x64, weight64), dy.double()))
    for ours, truth in zip(actual, expected, strict=True):
        assert ours.shape == truth.shape
        assert ours.dtype == torch.bfloat16
        assert ((ours - truth).abs() <= 2**-7 * truth.abs() + 1e-2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": ClampedSwiGLU()}], ids=["silu", "gpt-oss"])
def test_bf16_on_cuda_is_near_fp64_and_waits_for_nothing(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(64, 32, 8, dtype=torch.bfloat16, device="cuda", **options)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(33, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.rand(33, 8, device="cuda").topk(2).indices
    weights = torch.rand(33, 2, device="cuda", requires_grad=True)
    experts(x, chosen, weights).sum().backward()  # warm up
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = experts(x, chosen, weights)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = GroupedExperts(64, 32, 8, dtype=torch.float64, device="cuda", **options)
    wide.load_state_dict(experts.state_dict())
    exact = wide(x.double(), chosen, weights.double())
    assert (out - exact).norm() <= 1e-2 * exact.norm()


def test_initialisation_depends_on_the_seed_and_name_alone() -> None:
    first, second = GroupedExperts(8, 6, 4), GroupedExperts(8, 6, 4)
    initialize_(first, 3)
    initialize_(second, 3)
    assert torch.equal(first.gate_up_proj, second.gate_up_proj)
    assert not torch.equal(first.gate_up_proj[0], first.gate_up_proj[1])


def test_biases_begin_at_zero() -> None:
    """Though they are matrices, which `initialize_` draws otherwise."""
    experts = GroupedExperts(8, 6, 4, bias=True)
    for _ in range(2):
        assert experts.gate_up_proj.any()
        assert not experts.gate_up_proj_bias.any()
        assert not experts.down_proj_bias.any()
        initialize_(experts, 3)


@pytest.mark.parametrize(
    ("activation", "message"),
    [("tan", "activation='tan' is unknown"), ("xielu", "'xielu' is unknown; .* xielu without a gate")],
)
def test_an_activation_that_experts_do_not_have(activation: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedExperts(8, 6, 4, activation=activation)
