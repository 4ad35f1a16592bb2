"""The gated delta rule on a GPU: outputs, states and every gradient against fp64, and no read on the host."""

from typing import Any

import pytest
import torch
from token_recurrence import boundaries, token_recurrence
from torch import Tensor

from parallel_layers.linear_attention.backends import BACKENDS, why_not
from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule

pytestmark = pytest.mark.gpu

LENGTHS = [130, 1, 0, 64, 63, 65, 3, 0]
KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 128


def arguments_of(per_channel: bool) -> list[Tensor]:
    """fp64 tensors on the GPU whose numbers are of bf16, except the decays and the states."""
    torch.manual_seed(0)
    tokens, wide = sum(LENGTHS), {"dtype": torch.float64, "device": "cuda"}
    sizes = [(KEY_HEADS, DIM), (KEY_HEADS, DIM), (VALUE_HEADS, DIM)]
    q, k, v = (torch.randn(tokens, *size, **wide).bfloat16().double() for size in sizes)
    decay = torch.randn(tokens, VALUE_HEADS, *[DIM] * per_channel, **wide).sub(1).exp().neg()
    beta = torch.rand(tokens, VALUE_HEADS, **wide).bfloat16().double()
    return [q, k, v, decay, beta, torch.randn(len(LENGTHS), VALUE_HEADS, DIM, DIM, **wide)]


def results_of(function: Any, arguments: list[Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Outputs, states and gradients; `dtype` is that of q, k, v and beta, the rest is fp32 with it."""
    dtypes = [dtype, dtype, dtype, None, dtype, None]
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [x.to(kind or wide).requires_grad_() for x, kind in zip(arguments, dtypes, strict=True)]
    *tokens, initial_state = leaves
    bounds = boundaries(LENGTHS).cuda()
    out, state = function(*tokens, bounds, normalize=True, initial_state=initial_state, **options)
    torch.manual_seed(1)
    seeds = [torch.randn(x.shape, dtype=torch.float64).to(x) for x in (out, state)]
    gradients = torch.autograd.grad([out, state], leaves, [seed.bfloat16().to(seed) for seed in seeds])
    names = ["out", "state", "d_q", "d_k", "d_v", "d_decay", "d_beta", "d_state"]
    return dict(zip(names, (out, state, *gradients), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_recurrence(backend: str, per_channel: bool, dtype: torch.dtype) -> None:
    if reason := why_not(backend, "cuda", dtype, DIM, per_channel=per_channel, gradients=True):
        pytest.skip(f"{backend}: {reason}")
    arguments = arguments_of(per_channel)
    truth = results_of(token_recurrence, arguments, torch.float64)
    ours = results_of(gated_delta_rule, arguments, dtype, output_state=True, backend=backend)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    errors = {
        name: ((x.double() - truth[name]).abs().max() / truth[name].abs().max()).item() for name, x in ours.items()
    }
    assert all(error < limit for error in errors.values()), errors


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_does_not_reach_another(backend: str, per_channel: bool) -> None:
    """Other numbers in the first sequence change no bit of the other sequences."""
    if reason := why_not(backend, "cuda", torch.bfloat16, DIM, per_channel=per_channel, gradients=True):
        pytest.skip(f"{backend}: {reason}")
    arguments = arguments_of(per_channel)
    others = [x.clone() for x in arguments]
    first = LENGTHS[0]
    for x in others[:-1]:
        x[:first] = x[:first].flip(0) * 0.5
    others[-1][0] *= -1
    options = {"output_state": True, "backend": backend}
    plain, changed = (results_of(gated_delta_rule, x, torch.bfloat16, **options) for x in (arguments, others))
    for name, x in plain.items():
        start = 1 if len(x) == len(LENGTHS) else first
        assert torch.equal(x[start:], changed[name][start:]), name


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_equals_one_on_the_cpu(dtype: torch.dtype, silu: bool) -> None:
    """The input is a slice of wider rows, as in the layer. fla computes bf16 where it is installed."""
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(sum(LENGTHS), 300), torch.randn(200, 4), torch.randn(200)
    rows, seed = rows.to(dtype), torch.randn(sum(LENGTHS), 200).to(dtype)

    def run(device: str, kind: torch.dtype) -> list[Tensor]:
        x = rows.to(device, kind).requires_grad_()
        leaves = [x, *(t.to(device, torch.promote_types(kind, torch.float32)).requires_grad_() for t in (weight, bias))]
        options = {"bias": leaves[2], "activation": "silu" if silu else None}
        out, _ = short_convolution(x[:, :200], leaves[1], boundaries(LENGTHS).to(device), **options)
        return [out, *torch.autograd.grad(out, leaves, seed.to(device, kind))]

    for ours, truth in zip(run("cuda", dtype), run("cpu", torch.float64), strict=True):
        error = (ours.double().cpu() - truth).abs().max() / truth.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("backend", "per_channel"), [("fla", False), ("chunked", False), ("chunked", True)])
def test_nothing_waits_for_the_gpu(backend: str, per_channel: bool) -> None:
    """Other boundaries come each time, so that no kernel's cache of their values hides a read."""
    if reason := why_not(backend, "cuda", torch.bfloat16, DIM, per_channel=per_channel, gradients=True):
        pytest.skip(f"{backend}: {reason}")
    arguments = arguments_of(per_channel)
    *tokens, _ = (x.to(torch.bfloat16).requires_grad_() for x in arguments)
    tokens[3] = arguments[3].float().requires_grad_()

    weight = torch.randn(VALUE_HEADS * DIM, 4, device="cuda", requires_grad=True)

    def run(bounds: Tensor) -> None:
        out, _ = gated_delta_rule(*tokens, bounds, normalize=True, backend=backend)
        short_convolution(out.flatten(1), weight, bounds, activation="silu")[0].sum().backward()

    later = boundaries(LENGTHS[::-1]).cuda()
    run(boundaries(LENGTHS).cuda())  # compiles and tunes the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(later)
    finally:
        torch.cuda.set_sync_debug_mode("default")
