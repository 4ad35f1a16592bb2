"""Mamba-2's kernels against the chunked form in fp64: outputs, states, every gradient, and maps of slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import state_space, state_space_backward
from parallel_layers.kernels.state_space import Tiles
from parallel_layers.linear_attention.operators import chunked_gated_delta_rule, gradients_before_slices, slice_maps

NAMES = ("C", "B", "x", "decay", "dt", "skip", "initial")
LENGTHS = [17, 1, 0, 16, 0, 3]
# Heads, groups, head size, state size, and whether there are a skip and initial states.
CASES = {
    "heads that share a group in two programs": (6, 2, 5, 6, True, True),
    "one head, nothing optional": (1, 1, 16, 16, False, False),
    "states in parts": (2, 1, 20, 17, True, True),
}
ON_GPUS = {
    "Nemotron-H": (16, 1, 64, 128, True, True),
    "Granite": (8, 1, 64, 256, True, False),
    "wide heads": (4, 2, 128, 64, False, True),
    "wide heads and states": (2, 1, 128, 256, True, True),
}


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens, and more than one part of a state, in the interpreter."""
    if "device" in request.fixturenames and request.getfixturevalue("device").type == "cpu":
        tiles = Tiles(size=16, state=(16, 16), part=(16, 16), heads=2, warps=(4, 4), stages=(1, 1))
        for table in (state_space.FORWARD, state_space_backward.BACKWARD):
            monkeypatch.setitem(table, torch.float32, tiles)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def arguments_of(
    case: tuple[Any, ...], lengths: list[int], device: torch.device, dtype: torch.dtype, *, states: int = 0
) -> list[Tensor | None]:
    """C, B, x, the log decays, the steps, the skip, and initial states; B and C are parts of wider rows."""
    torch.manual_seed(0)
    heads, groups, head_dim, dim, has_skip, has_states = case
    tokens, wide = sum(lengths), {"device": device}
    rows = torch.randn(tokens, 2 * groups * dim + 16, **wide).to(dtype)
    c, b = rows[:, : 2 * groups * dim].unflatten(1, (2 * groups, dim)).split(groups, 1)
    x = torch.randn(tokens, heads, head_dim, **wide).to(dtype)
    steps = torch.randn(tokens, heads, **wide).sub(1).exp() * (torch.rand(tokens, heads, **wide) > 0.1)
    decay = -steps * torch.linspace(0.01, 2, heads, **wide)
    skip = torch.randn(heads, **wide) if has_skip else None
    initial = torch.randn(states or len(lengths), heads, dim, head_dim, **wide) if has_states else None
    return [c, b, x, decay, steps, skip, initial]


def results_of(
    form: str, arguments: list[Tensor | None], lengths: list[int], dtype: torch.dtype | None = None, slices: int = 0
) -> dict[str, Tensor]:
    """Outputs, states, and the gradients of all arguments by both."""
    leaves = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in arguments]
    x = leaves[2]
    assert x is not None
    out, state = chunked_gated_delta_rule(*leaves, boundaries(lengths).to(x.device), 1.0, False, True, slices, form)
    torch.manual_seed(1)
    seeds = [torch.randn(result.shape).bfloat16().to(result) for result in (out, state)]
    present = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None}
    gradients = torch.autograd.grad([out, state], list(present.values()), seeds)
    return {"out": out.detach(), "state": state.detach(), **dict(zip(present, gradients, strict=True))}


def compare(results: dict[str, Tensor], truth: dict[str, Tensor], limit: float) -> None:
    """Every element within `limit` of the tensor's largest one."""
    for name, expected in truth.items():
        atol = limit * expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(
            results[name].double(), expected.double(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
def test_equals_the_chunked_form(device: torch.device, case: str) -> None:
    arguments = arguments_of(CASES[case], LENGTHS, device, torch.float32)
    truth = results_of("state_space", arguments, LENGTHS, torch.float64)
    compare(results_of("triton", arguments, LENGTHS), truth, 2e-6 if device.type == "cpu" else 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)], ids=str)
@pytest.mark.parametrize("case", ON_GPUS)
def test_on_gpus(case: str, dtype: torch.dtype, limit: float) -> None:
    """Long and short sequences: chunks of 16 to 128 tokens."""
    for lengths in ([130, 1, 0, 64, 63, 300, 127, 129], [7] * 40, [1000]):
        arguments = arguments_of(ON_GPUS[case], lengths, torch.device("cuda"), dtype)
        compare(
            results_of("triton", arguments, lengths),
            results_of("state_space", arguments, lengths, torch.float64),
            limit,
        )


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    """Other boundaries come the second time."""
    arguments = arguments_of(ON_GPUS["Nemotron-H"], LENGTHS, torch.device("cuda"), torch.bfloat16)
    *tensors, _ = (None if x is None else x.requires_grad_() for x in arguments)
    options = 1.0, False, False, 0, "triton"

    def run(bounds: Tensor) -> None:
        chunked_gated_delta_rule(*tensors, None, bounds, *options)[0].sum().backward()

    later = boundaries(LENGTHS[::-1]).cuda()
    run(boundaries(LENGTHS).cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(later)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_sequence_does_not_reach_another(device: torch.device) -> None:
    """Other numbers in the first sequence change no bit of the others' outputs, states and gradients."""
    arguments = arguments_of(CASES["states in parts"], LENGTHS, device, torch.float32)
    others = [None if x is None else x.clone() for x in arguments]
    for x in (x for n, x in enumerate(others) if NAMES[n] != "skip"):
        assert x is not None
        x[: 1 if len(x) == len(LENGTHS) else LENGTHS[0]] *= 0.5
    plain, changed = (results_of("triton", x, LENGTHS) for x in (arguments, others))
    for name, x in plain.items():
        first = {len(LENGTHS): 1, sum(LENGTHS): LENGTHS[0]}.get(len(x))
        if name != "skip":
            assert first is not None
            assert torch.equal(x[first:], changed[name][first:]), name
            assert not torch.equal(x[:first], changed[name][:first]), name


def test_states_of_slices(device: torch.device) -> None:
    """The first slice ends inside a sequence, and the second is inside one; sequences of length 0 stand at borders."""
    lengths, case = [0, 9, 3, 12, 0, 0, 4, 8, 0], CASES["states in parts"]
    arguments = arguments_of(case, lengths, device, torch.float32, states=3)
    truth = results_of("state_space", arguments, lengths, torch.float64, slices=3)
    compare(results_of("triton", arguments, lengths, slices=3), truth, 2e-6 if device.type == "cpu" else 2e-5)
    c, b, x, decay, steps, *_ = (None if t is None else t.double() for t in arguments)
    tensors, bounds = (c, b, x, decay, steps), boundaries(lengths).to(device)
    d_out = torch.randn(x.shape, device=device)
    for function, first, options in (
        (slice_maps, (), (False, 3)),
        (gradients_before_slices, (d_out,), (1.0, False, 3)),
    ):
        ours = function(*first, *arguments[:5], bounds, *options, "triton")
        expected = function(*(t.double() for t in first), *tensors, bounds, *options, "state_space")
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("decay", [-0.01, -1, -8])
def test_the_gradient_of_a_decay_is_exact_in_fp32(device: torch.device, decay: float) -> None:
    """Where a token remembers e^-8, the decay's gradient is small beside the products of each token with itself."""
    arguments = arguments_of((2, 1, 16, 16, False, False), [40], device, torch.float32)
    arguments[3] = torch.full_like(arguments[3], decay)
    truth = results_of("state_space", arguments, [40], torch.float64)
    compare(results_of("triton", arguments, [40]), truth, 2e-6 if device.type == "cpu" else 2e-5)
