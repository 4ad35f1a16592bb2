"""The experts' GEMMs by quack: on a CPU by a stand-in with its demands, on a Hopper GPU by its kernels."""

from __future__ import annotations

import cpu_quack
import pytest
import torch
from torch import Tensor, nn

from parallel_layers.kernels.quack import has_quack, is_hopper
from parallel_layers.moe import ClampedSwiGLU, MoE, MoEConfig, experts, grouped_linear
from parallel_layers.moe.grouped_gemm import grouped_gemm, is_faster

COUNTS = [[3, 0, 40, 17], [0, 0, 5, 0], [1, 130, 0, 1]]


def run(x: Tensor, weight: Tensor, counts: list[int], dy: Tensor, *, input_major: bool) -> list[Tensor]:
    """y, dx and dW of a weight `[e, N, K]`, stored as `[e, K, N]` if `input_major`."""
    x = x.clone().requires_grad_()
    stored = (weight.transpose(1, 2).contiguous() if input_major else weight.clone()).requires_grad_()
    y = grouped_gemm(x, stored, torch.tensor(counts, device=x.device), input_major=input_major)
    dx, dw = torch.autograd.grad(y, (x, stored), dy)
    assert dw.is_contiguous()
    return [y.detach(), dx, dw.transpose(1, 2) if input_major else dw]


def truth(x: Tensor, weight: Tensor, counts: list[int], dy: Tensor) -> list[Tensor]:
    runs = list(zip(x.split(counts), weight, dy.split(counts), strict=True))
    y, dx = (torch.cat(parts) for parts in zip(*((rows @ one.T, d @ one) for rows, one, d in runs), strict=True))
    return [y, dx, torch.stack([d.T @ rows for rows, _, d in runs])]


@pytest.mark.parametrize("input_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("width", [64, 448], ids=["wide", "narrow"])  # columns of dW in whole tiles, or rows
def test_forward_and_gradients(monkeypatch: pytest.MonkeyPatch, width: int, input_major: bool) -> None:
    """Every kernel is compiled once, at whatever number of rows."""
    compiled = cpu_quack.install(monkeypatch)
    torch.manual_seed(0)
    weight = torch.randn(4, 384, width)
    for counts in COUNTS:
        x, dy = torch.randn(sum(counts), width), torch.randn(sum(counts), 384)
        found = run(x, weight, counts, dy, input_major=input_major)
        torch.testing.assert_close(found, truth(x, weight, counts, dy), rtol=1e-5, atol=1e-4)
    assert len(compiled) == 3


@pytest.mark.parametrize(("outputs", "inputs"), [(320, 64), (64, 320)])
def test_large_weights_have_one_tile(monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int) -> None:
    """Forward and both gradients; sizes that fill tiles of 192 keep those."""
    compiled = cpu_quack.install(monkeypatch)
    monkeypatch.setattr("parallel_layers.moe.grouped_gemm.LARGE_SIZE", 64 * 320)
    for sizes, tiles in (((outputs, inputs), {(128, 256)}), ((384, inputs), {(128, 192), (128, 256)})):
        compiled.clear()
        weight, counts = torch.randn(4, *sizes), COUNTS[0]
        x, dy = torch.randn(sum(counts), sizes[1]), torch.randn(sum(counts), sizes[0])
        found = run(x, weight, counts, dy, input_major=False)
        torch.testing.assert_close(found, truth(x, weight, counts, dy), rtol=1e-5, atol=1e-4)
        assert {(plan["tile_M"], plan["tile_N"]) for plan in compiled} == tiles


def test_operands_of_any_strides_and_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_quack.install(monkeypatch)
    x, weight = torch.randn(8, 5).t().requires_grad_(), torch.randn(2, 6, 8)
    grouped_gemm(x, weight, torch.tensor([2, 3])).sum().backward()  # an expanded gradient
    expected = torch.cat([torch.ones(rows, 6) @ one for rows, one in zip([2, 3], weight, strict=True)])
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("gpt_oss", [False, True], ids=["qwen3", "gpt-oss"])
def test_a_layer_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch, gpt_oss: bool) -> None:
    """The loop over the experts gives the same outputs and gradients. A layer without tokens has an empty output."""
    cpu_quack.install(monkeypatch)
    more = {"input_major_experts": True, "alternating_gate_up": True, "expert_bias": True, "router_bias": True}
    options = {"activation": ClampedSwiGLU(limit=1.5), **more} if gpt_oss else {}
    layer = MoE(16, MoEConfig(num_experts=8, top_k=3, intermediate_size=24, **options))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, d_out = torch.randn(7, 16, requires_grad=True), torch.randn(7, 16)
    results = []
    for by_quack in (False, True):
        monkeypatch.setattr(experts, "is_one_kernel", lambda weight, by_quack=by_quack: by_quack)
        monkeypatch.setattr(experts, "is_faster", lambda weight, by_quack=by_quack: by_quack)
        out = layer(x)
        results.append([out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], d_out)])
        assert layer(x[:0]).shape == (0, 16)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_only_sizes_that_gain_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_hopper", "has_quack"):
        monkeypatch.setattr(f"parallel_layers.moe.grouped_gemm.{name}", lambda *_: True)
    sizes = {(1536, 2048): True, (5760, 2880): True, (28672, 4096): True, (16, 2048): False, (1001, 2048): False}
    found = {size: is_faster(torch.empty(2, *size, dtype=torch.bfloat16, device="meta")) for size in sizes}
    assert found == sizes
    assert not is_faster(torch.empty(2, 1536, 2048, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("input_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("outputs", "inputs"), [(768, 512), (520, 576), (2048, 4096)], ids=["narrow", "wide", "large"])
def test_kernels_on_a_gpu(outputs: int, inputs: int, input_major: bool) -> None:
    """Near fp64 per element; the same bits again, and for a row among other rows; nothing is read on the host."""
    if not (is_hopper(torch.device("cuda", torch.cuda.current_device())) and has_quack()):
        pytest.skip("needs a Hopper GPU and quack-kernels")
    torch.manual_seed(0)
    weight = torch.randn(4, outputs, inputs, device="cuda").bfloat16()
    assert is_faster(weight)
    for counts in [[3, 0, 700, 17], [0, 0, 5, 0], [130, 256, 1, 0]]:
        x, dy = (torch.randn(sum(counts), size, device="cuda").bfloat16() for size in (inputs, outputs))
        first = run(x, weight, counts, dy, input_major=input_major)
        again = run(x, weight, counts, dy, input_major=input_major)
        expected = truth(x.double(), weight.double(), counts, dy.double())
        for ours, same, exact in zip(first, again, expected, strict=True):
            assert torch.equal(ours, same)
            assert ((ours - exact).abs() <= 2**-7 * exact.abs() + 0.1).all()
    whole = grouped_linear(x, weight, torch.tensor(counts, device="cuda"))
    part = grouped_linear(x[50:200].contiguous(), weight, torch.tensor([80, 70, 0, 0], device="cuda"))
    assert torch.equal(whole[50:200], part)
    on_gpu = torch.tensor(counts, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        x = x.requires_grad_()
        grouped_linear(x, weight, on_gpu).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
