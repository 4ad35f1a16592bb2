"""The kernels of single tokens against the plain steps in fp64: outputs, new states, and rows that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import recurrent_steps
from parallel_layers.kernels.recurrent_steps import update_states, update_windows
from parallel_layers.linear_attention.recurrent import convolution_step_, gated_delta_step_, state_space_step_

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
# Tokens, key heads, value heads, key size, value size; one row stands before the first.
SMALL, LARGE = (3, 2, 4, 6, 20), (65, 8, 32, 128, 128)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_steps, "COLUMNS", 16)


def check(actual: Tensor, expected: Tensor, limit: float) -> None:
    atol = limit * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


def pool_of(*sizes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rows of the first of two layers, one before and one behind those of the tokens."""
    tokens, *others = sizes
    return torch.randn(tokens + 2, 2, *others, device=device).to(dtype)[:, 0]


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [x if x is None or x.dtype == torch.bool else x.double() for x in tensors]


def check_states(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], *, delta: bool, per_channel: bool = False
) -> None:
    torch.manual_seed(0)
    tokens, key_heads, heads, dim, head_dim = sizes
    states = pool_of(tokens, heads, dim, head_dim, device=device, dtype=torch.float32)
    rows = torch.randn(tokens, 2 * key_heads * dim + heads * head_dim, device=device).to(dtype)
    q, k, v = rows.split([key_heads * dim, key_heads * dim, heads * head_dim], 1)
    q, k, v = q.unflatten(1, (key_heads, dim)), k.unflatten(1, (key_heads, dim)), v.unflatten(1, (heads, head_dim))
    beta = torch.rand(tokens, heads, device=device)
    live = torch.arange(tokens, device=device) != 1
    expected = states.double()
    kept = states.clone()
    options: dict[str, Any]
    if delta:
        decay = -torch.rand(tokens, heads, *[dim] * per_channel, device=device)
        out = gated_delta_step_(expected, *wide(q, k, v, decay, beta), first=1, normalize=True, live_M=live)
        tensors, options = (q, k, v, decay, beta), {"delta": True, "normalize": True, "scale": dim**-0.5}
    else:
        rates, skip = -torch.rand(heads, device=device), torch.randn(heads, device=device)
        out = state_space_step_(expected, *wide(v, beta, rates, k, q), first=1, D_V=skip, live_M=live)
        tensors, options = (q, k, v, beta, beta), {"delta": False, "rates": rates, "skip": skip}
    ours = update_states(states[1:-1], *tensors, live, **options)
    check(ours[live], out[live], LIMITS[dtype])
    check(states, expected, 1e-6)
    stay = torch.tensor([0, 2, tokens + 1], device=device)
    assert torch.equal(states[stay], kept[stay])
    changed = states.clone()
    update_states(states[1:-1], *tensors, None, **options)
    assert not torch.equal(states[2], changed[2])


def check_windows(device: torch.device, dtype: torch.dtype, tokens: int, channels: int, *, silu: bool) -> None:
    torch.manual_seed(0)
    windows = pool_of(tokens, 3, channels, device=device, dtype=dtype)
    x, weight = (
        torch.randn(tokens, channels + 8, device=device).to(dtype)[:, :channels],
        torch.randn(channels, 4).to(device),
    )
    bias = torch.randn(channels, device=device) if silu else None
    live = torch.arange(tokens, device=device) != 1
    expected = windows.double()
    options = {"bias": wide(bias)[0], "activation": "silu" if silu else None, "first": 1, "live_M": live}
    out = convolution_step_(expected, x.double(), weight.double(), **options)
    ours = update_windows(windows[1:-1], x, weight, bias, live, silu)
    check(ours[live], out[live], LIMITS[dtype])
    assert torch.equal(windows.double(), expected)


@pytest.mark.parametrize(("delta", "per_channel"), [(True, False), (True, True), (False, False)])
def test_states(device: torch.device, delta: bool, per_channel: bool) -> None:
    check_states(device, torch.float32, SMALL, delta=delta, per_channel=per_channel)


@pytest.mark.parametrize("silu", [False, True])
def test_windows(device: torch.device, silu: bool) -> None:
    check_windows(device, torch.float32, 3, 300, silu=silu)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("delta", [True, False])
def test_on_gpus(delta: bool, dtype: torch.dtype) -> None:
    check_states(torch.device("cuda"), dtype, LARGE, delta=delta)
    check_windows(torch.device("cuda"), dtype, 65, 8192, silu=delta)
