from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.kernels.gated_norm import MAX_SIZE, fused_gated_rms_norm

# The gate first, SiLU, and a weight for each group: Mamba-2, gated delta networks, Kimi, and the fourth form.
FORMS = [(True, True, True), (False, True, False), (False, False, False), (True, False, False)]


def arguments_of(shape: tuple[int, int, int], by_group: bool, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, the gate as a part of wider rows, and the weight."""
    torch.manual_seed(1)
    rows = torch.randn(shape[0], shape[1] * shape[2] + 5, device=device)
    gate = (2 * rows[:, 3:-2]).unflatten(1, shape[1:]).to(dtype)
    wide = torch.zeros(*rows.shape, device=device, dtype=dtype)
    wide[:, 3:-2] = gate.flatten(1)
    weight = torch.randn(shape[1:] if by_group else shape[2:], device=device).to(dtype)
    return [torch.randn(shape, device=device).to(dtype), wide[:, 3:-2].unflatten(1, shape[1:]), weight]


def reference(x: Tensor, gate: Tensor, weight: Tensor, gate_first: bool, silu: bool) -> Tensor:
    factor = F.silu(gate) if silu else gate.sigmoid()
    unit = x * factor if gate_first else x
    normed = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + 1e-5) * weight
    return normed if gate_first else normed * factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gate_first", "silu", "by_group"), FORMS)
@pytest.mark.parametrize("shape", [(5, 3, 96), (1, 1, 1), (67, 2, 33), (3, 1, 2560)])
def test_norm_and_gradients(
    device: torch.device, unit: dict[torch.dtype, float], shape: tuple[int, int, int], gate_first: bool, silu: bool,
    by_group: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in arguments_of(shape, by_group, dtype, device)]
    y = fused_gated_rms_norm(*leaves, 1e-5, gate_first, silu)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, dy)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y64 = reference(*wide, gate_first, silu)
    for actual, expected in zip((y, *gradients), (y64, *torch.autograd.grad(y64, wide, dy.double())), strict=True):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        # The norm before the gate is rounded, too.
        limit = (1 if gate_first else 2.1) * unit[dtype] * expected.abs() + 1e-5 * expected.abs().max().clamp(min=1)
        assert ((actual - expected).abs() <= limit).all()


def test_no_tokens(device: torch.device) -> None:
    x, weight = (
        torch.zeros(0, 2, 8, device=device, requires_grad=True),
        torch.ones(8, device=device, requires_grad=True),
    )
    fused_gated_rms_norm(x, x, weight, 1e-5, True).sum().backward()
    assert x.grad.shape == x.shape
    assert not weight.grad.any()


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    x = torch.zeros(2, 3, 4, device=device)
    for gate, weight in ((x[:1], x[0]), (x.double(), x[0]), (x, x[0, :2])):
        with pytest.raises(ValueError, match=r"x and gate must be alike \[T, G, S\] with S up to"):
            fused_gated_rms_norm(x, gate, weight, 1e-5, True)
    wide = torch.zeros(1, 1, MAX_SIZE + 1, device=device)
    with pytest.raises(ValueError, match=f"S up to {MAX_SIZE}"):
        fused_gated_rms_norm(wide, wide, wide[0], 1e-5, True)
