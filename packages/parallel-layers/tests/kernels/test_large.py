"""Tensors of more than 2^31 elements: their last rows come out as they do alone (`test_rotary.py` has heads so far)."""

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels.matmul import invariant_matmul
from parallel_layers.kernels.rms_norm import fused_rms_norm
from parallel_layers.kernels.swiglu import fused_swiglu

pytestmark = pytest.mark.gpu

LAST = 16


def rows_past_32_bits(size: int) -> Tensor:
    return torch.randn(2**31 // size + LAST, size, device="cuda", dtype=torch.bfloat16)


def test_norm() -> None:
    x, weight = rows_past_32_bits(4096).requires_grad_(), torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    last = x.detach()[-LAST:].clone().requires_grad_()
    results = []
    for rows in (x, last):
        normed, total = fused_rms_norm(rows, weight, rows)
        (gradient,) = torch.autograd.grad((normed, total), rows, (normed.detach(), total.detach()))
        results.append([part.detach()[-LAST:] for part in (normed, total, gradient)])
    for many, alone in zip(*results, strict=True):
        assert torch.equal(many, alone)


def test_swiglu() -> None:
    gate_up = rows_past_32_bits(28672).requires_grad_()
    last = gate_up.detach()[-LAST:].clone().requires_grad_()
    results = []
    for rows in (gate_up, last):
        out = fused_swiglu(rows)
        (gradient,) = torch.autograd.grad(out, rows, out.detach())
        results.append([part.detach()[-LAST:] for part in (out, gradient)])
    for many, alone in zip(*results, strict=True):
        assert torch.equal(many, alone)


def test_product() -> None:
    x = rows_past_32_bits(4096)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
    assert torch.equal(invariant_matmul(x, weight)[-LAST:], invariant_matmul(x[-LAST:], weight))
