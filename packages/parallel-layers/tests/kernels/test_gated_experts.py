from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels.gated_experts import GLU, weighted_glu

GPT_OSS = {"alpha": 1.702, "limit": 1.5, "offset": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 64, 1500])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("constants", [{}, GPT_OSS], ids=["swiglu", "gpt-oss"])
def test_activation_and_gradients(
    device: torch.device,
    unit: dict[torch.dtype, float],
    constants: dict[str, float],
    alternating: bool,
    biased: bool,
    size: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    glu = GLU(**constants, alternating=alternating)
    rows, num_experts = 7, 3
    x = (2 * torch.randn(rows, 2 * size, device=device)).to(dtype).requires_grad_()
    weights = torch.rand(rows, device=device, requires_grad=True)
    bias = torch.randn(num_experts, 2 * size, device=device).to(dtype).requires_grad_() if biased else None
    experts = torch.randint(num_experts, (rows,), device=device) if biased else None
    y = weighted_glu(x, weights, glu, bias_e2I=bias, experts_M=experts)
    dy = torch.randn(rows, size, device=device).to(dtype)
    inputs = [x, weights, *([] if bias is None else [bias])]
    actual = [y, *torch.autograd.grad(y, inputs, dy)]

    wide = [t.detach().double().requires_grad_() for t in inputs]
    columns = wide[0] if experts is None else wide[0] + wide[2][experts]
    gate, up = columns.unflatten(-1, (-1, 2)).unbind(-1) if alternating else columns.chunk(2, dim=-1)
    gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit) + glu.offset
    truth = wide[1][:, None] * gate * torch.sigmoid(glu.alpha * gate) * up
    expected = [truth, *torch.autograd.grad(truth, wide, dy.double())]
    for number, (one, exact) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == (torch.float32 if number == 2 else dtype)
        # The bias's gradient sums rounded rows.
        terms = rows if number == 3 else 1
        assert ((one - exact).abs() <= terms * unit[dtype] * exact.abs().max() + 1e-5 * (1 + exact.abs())).all()


def test_no_rows(device: torch.device) -> None:
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    weights = torch.zeros(0, device=device, requires_grad=True)
    weighted_glu(x, weights).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 8)


@pytest.mark.gpu
def test_compiles_whole_for_two_lengths() -> None:
    compiled = torch.compile(lambda x, weights: weighted_glu(x, weights) * 2, fullgraph=True)
    for rows in (16, 33):
        inputs = [torch.randn(rows, 64, device="cuda", requires_grad=True), torch.rand(rows, device="cuda")]
        expected = torch.autograd.grad((weighted_glu(*inputs) * 2).sum(), inputs[0])
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sum(), inputs[0]), expected)
