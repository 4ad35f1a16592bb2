"""Experts in FP8: the GEMMs of operands that are rounded as defined, forward, dx and dW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_layers.linear.float8 import with_float8
from parallel_layers.module.shared_weights import view_of
from parallel_layers.moe import MoE, MoEConfig, grouped_linear
from parallel_layers.moe.dispatch import Dispatch
from parallel_layers.moe.experts import GroupedExperts
from parallel_layers.moe.float8 import float8_grouped_linear, why_not_float8_experts

COUNTS = [[3, 0, 40, 17], [0, 0, 5, 0], [16, 16, 16, 16], [1, 130, 0, 1]]


def scale_of(x: Tensor) -> float:
    """The smallest power of two that brings all numbers to at most 448."""
    largest, scale = float(x.abs().max()) if x.numel() else 0.0, 2.0**-60
    while largest > 448 * scale:
        scale *= 2
    return scale


def rounded(x: Tensor, scale: float) -> Tensor:
    """`x / scale` in FP8, times the scale."""
    return (x.float() / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def by_row(x: Tensor) -> Tensor:
    return torch.stack([rounded(row, scale_of(row)) for row in x]) if len(x) else x


def by_definition(x: Tensor, weight: Tensor, counts: list[int], dy: Tensor, *, transposed: bool) -> list[Tensor]:
    """y, dx and dW expert by expert; a weight that is stored transposed has its row scales in dx."""
    y, dx, dw = [], [], []
    for rows, d_rows, one in zip(x.split(counts), dy.split(counts), weight, strict=True):
        whole = rounded(one, scale_of(one))
        forward, backward = (whole, by_row(one.T).T) if transposed else (by_row(one), whole)
        y.append(by_row(rows) @ forward.T)
        dx.append(by_row(d_rows) @ backward)
        of_dy, of_x = (rounded(by_row(operand), scale_of(operand)) for operand in (d_rows, rows))
        dw.append(of_dy.T @ of_x)
    return [torch.cat(y), torch.cat(dx), torch.stack(dw)]


def operands(counts: list[int], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and gradients of rows, each over several powers of ten."""
    torch.manual_seed(0)
    rows = sum(counts)
    spread = torch.logspace(-2, 2, rows, dtype=torch.float64)[torch.randperm(rows), None]
    x, dy = torch.randn(rows, 64).double() * spread, torch.randn(rows, 48).double() / spread.flip(0)
    weight = torch.randn(len(counts), 48, 64).double() * torch.logspace(-2, 1, 48)[:, None]
    return tuple(operand.bfloat16().to(device) for operand in (x, weight, dy))  # type: ignore[return-value]


def run(x: Tensor, weight: Tensor, counts: Tensor, dy: Tensor, *, transposed: bool) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    stored = (weight.transpose(1, 2).contiguous() if transposed else weight.clone()).requires_grad_()
    given = stored.transpose(1, 2) if transposed else stored
    y = float8_grouped_linear(x, given, counts)
    dx, dw = torch.autograd.grad(y, (x, stored), dy)
    return y.detach(), dx, dw.transpose(1, 2) if transposed else dw


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_equals_the_definition(counts: list[int], transposed: bool) -> None:
    x, weight, dy = (operand.double() for operand in operands(counts))
    found = run(x, weight, torch.tensor(counts), dy, transposed=transposed)
    for ours, truth in zip(found, by_definition(x, weight, counts, dy, transposed=transposed), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [*COUNTS, [0, 0, 0, 700]], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_equals_the_definition_on_a_gpu(counts: list[int], transposed: bool) -> None:
    """Within bf16's rounding, and the 13 binary places to which a Hopper GPU sums FP8; nothing is read on the host."""
    x, weight, dy = operands(counts, "cuda")
    if (reason := why_not_float8_experts(weight)) is not None:
        pytest.skip(reason)
    on_gpu = torch.tensor(counts, device="cuda")
    found = run(x, weight, on_gpu, dy, transposed=transposed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(x, weight, on_gpu, dy, transposed=transposed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = [operand.double().cpu() for operand in (x, weight, dy)]
    truths = by_definition(wide[0], wide[1], counts, wide[2], transposed=transposed)
    for ours, other, truth in zip(found, again, truths, strict=True):
        assert torch.equal(ours, other)
        assert (ours.double().cpu() - truth).norm() <= 2.0**-8 * truth.norm()


def test_no_rows() -> None:
    x, weight = torch.ones(0, 64, requires_grad=True), torch.ones(2, 48, 64, requires_grad=True)
    y = float8_grouped_linear(x, weight, torch.tensor([0, 0]))
    assert y.shape == (0, 48)
    assert not torch.autograd.grad(y.sum(), weight)[0].any()


def with_experts_in_float8(module: nn.Module, view: nn.Module) -> None:
    if isinstance(module, GroupedExperts):
        view.__dict__["product"] = float8_grouped_linear


@pytest.mark.parametrize("input_major", [False, True])
def test_a_layer_is_near_the_plain_layer(input_major: bool) -> None:
    """e4m3 has a relative error of 2^-4 at most, on average about 0.026; two GEMMs add theirs."""
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=4, top_k=2, intermediate_size=32, expert_bias=input_major, input_major_experts=input_major
    )
    layer = MoE(64, config)
    view = view_of(layer, with_experts_in_float8)
    x, dy = torch.randn(50, 64), torch.randn(50, 64)
    results = []
    for module in (view, layer):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() < 0.12 * theirs.norm()
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_that_are_copied_in_float8_are_the_same_bits(device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    experts = GroupedExperts(64, 32, 8, dtype=dtype, device=device)
    view = view_of(experts, with_experts_in_float8)
    x, dy = (torch.randn(50, 64, device=device).to(dtype) for _ in range(2))
    chosen, weights = torch.rand(50, 8, device=device).topk(3).indices, torch.rand(50, 3, device=device)

    def run(forward: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = forward(inputs[0], chosen, inputs[1])
        return y.detach(), *torch.autograd.grad(y, (*inputs, *experts.parameters()), dy)

    def by_rows(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        dispatch = Dispatch.plan(chosen, 8, None)
        return dispatch.to_tokens(view.compute(*dispatch.to_experts(x, weights), dispatch.counts))

    for ours, truth in zip(run(view), run(by_rows), strict=True):
        assert torch.equal(ours, truth)


def test_which_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_layers.linear.float8.require_float8", lambda recipe: None)
    model = nn.ModuleDict({name: GroupedExperts(32, size, 2) for name, size in (("able", 16), ("left_out", 16))})
    model["odd"], model["frozen"] = GroupedExperts(32, 24, 2), GroupedExperts(32, 16, 2)
    model["frozen"].down_proj_scale_inv = nn.Parameter(torch.ones(2, 1, 1))
    view = with_float8(model, where=lambda name, module: name != "left_out")
    assert {name: module.float8 for name, module in view.items()} == {name: name == "able" for name in model}
    assert view["able"].product is float8_grouped_linear
    assert all(module.product is grouped_linear for name, module in view.items() if name != "able")
    assert model["able"].product is grouped_linear
    with torch.device("meta"):
        sizes = {"mixtral": (4096, 14336), "qwen3": (2048, 768), "gpt-oss": (2880, 2880)}
        large = nn.ModuleDict({name: GroupedExperts(hidden, width, 2) for name, (hidden, width) in sizes.items()})
    assert [name for name, module in with_float8(large).items() if module.float8] == ["mixtral"]
    assert why_not_float8_experts(model["odd"].down_proj) == "their sizes [32, 24] are no multiples of 16"
    options: dict[str, Any] = {"where": lambda name, module: name == "odd"}
    with pytest.raises(ValueError, match="no linear or experts of the model can be in FP8"):
        with_float8(model, **options)
