from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from parallel_layers.kernels.swiglu import fused_swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 200), (2, 2 * 2304), (1, 2), (7, 2 * 2049)])
def test_swiglu_and_gradient(
    device: torch.device, unit: dict[torch.dtype, float], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    y = fused_swiglu(x)
    dy = torch.randn_like(y)
    y.backward(dy)

    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, dim=-1)
    y64 = F.silu(gate) * up
    y64.backward(dy.double())
    for actual, expected in ((y, y64), (x.grad, x64.grad)):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        assert ((actual - expected).abs() <= unit[dtype] * expected.abs() + 2e-6 * (1 + expected.abs())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3), (3, 4, 100), (2, 2304), (7, 2049), (0, 8)])
def test_gate_and_up_apart_are_the_halves_of_one(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    whole = (3 * torch.randn(*shape[:-1], 2 * shape[-1], device=device)).to(dtype).requires_grad_()
    gate, up = (x.detach().requires_grad_() for x in whole.chunk(2, dim=-1))  # strided
    y, apart = fused_swiglu(whole), fused_swiglu(gate, up)
    assert torch.equal(apart, y)
    dy = torch.randn_like(y)
    y.backward(dy)
    apart.backward(dy)
    assert torch.equal(torch.cat([gate.grad, up.grad], dim=-1), whole.grad)


def test_gate_and_up_that_differ_are_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"gate is torch.float32 \[2, 4\] and up is torch.float32 \[2, 3\]"):
        fused_swiglu(torch.zeros(2, 4, device=device), torch.zeros(2, 3, device=device))


def test_large_gates_do_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[-1e4, 1e4, -200.0, 2.0, 3.0, 4.0]], device=device, requires_grad=True)
    y = fused_swiglu(x)
    y.sum().backward()
    assert torch.equal(y[0, 1], torch.tensor(3e4, device=device))
    assert y[0, 0].abs() == 0
    assert x.grad.isfinite().all()


def test_strided_and_empty_inputs(device: torch.device) -> None:
    wide = torch.randn(6, 20, device=device)
    assert torch.equal(fused_swiglu(wide[:, 3:11]), fused_swiglu(wide[:, 3:11].contiguous()))
    empty = torch.zeros(0, 8, device=device, requires_grad=True)
    fused_swiglu(empty).sum().backward()
    assert empty.grad.shape == (0, 8)


def test_an_odd_width_is_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match="gate_up has 5 columns"):
        fused_swiglu(torch.zeros(2, 5, device=device))


@pytest.mark.gpu
def test_compiles_whole_for_two_lengths() -> None:
    compiled = torch.compile(lambda x: fused_swiglu(x) * 2, fullgraph=True)
    for rows in (16, 33):
        x = torch.randn(rows, 64, device="cuda", requires_grad=True)
        expected = torch.autograd.grad((fused_swiglu(x) * 2).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)


@pytest.mark.gpu
def test_gate_and_up_apart_compile_whole_for_two_lengths() -> None:
    compiled = torch.compile(lambda gate, up: fused_swiglu(gate, up) * 2, fullgraph=True)
    for rows in (16, 33):
        pair = [torch.randn(rows, 64, device="cuda", requires_grad=True) for _ in range(2)]
        expected = torch.autograd.grad((fused_swiglu(*pair) * 2).sum(), pair)
        torch.testing.assert_close(torch.autograd.grad(compiled(*pair).sum(), pair), expected)
