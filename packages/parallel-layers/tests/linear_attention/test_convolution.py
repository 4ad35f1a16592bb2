"""The short convolution against torch's convolution of one sequence at a time: outputs, states and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from token_recurrence import boundaries
from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers.linear_attention.convolution import ShortConvolution, short_convolution

CHANNELS, WINDOW = 5, 4
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5)


def one_by_one(
    x: Tensor, weight: Tensor, lengths: list[int], bias: Tensor | None, silu: bool, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    outs, states = [], []
    for n, part in enumerate(x.split(lengths)):
        before = x.new_zeros(WINDOW - 1, CHANNELS) if initial_state is None else initial_state[n]
        part = torch.cat([before, part])
        states.append(part[len(part) - WINDOW + 1 :])
        if len(part) >= WINDOW:
            out = F.conv1d(part.T[None], weight[:, None], bias, groups=CHANNELS)[0].T
            outs.append(F.silu(out) if silu else out)
    return torch.cat([x[:0], *outs]), torch.stack(states)


def results_of(
    function: Callable[..., tuple[Tensor, Tensor | None]], leaves: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [None if x is None else x.clone().requires_grad_() for x in leaves]
    outs = [x for x in function(*leaves) if x is not None]
    torch.manual_seed(3)
    seeds = [torch.randn(x.shape, dtype=x.dtype) for x in outs]
    inputs = [x for x in leaves if x is not None]
    return outs, list(torch.autograd.grad(outs, inputs, seeds, materialize_grads=True))


@given(lengths=LENGTHS, bias=st.booleans(), silu=st.booleans(), state=st.booleans(), initial=st.booleans())
@settings(max_examples=40)
def test_equals_one_sequence_at_a_time(lengths: list[int], bias: bool, silu: bool, state: bool, initial: bool) -> None:
    torch.manual_seed(0)
    wide: dict[str, Any] = {"dtype": torch.float64}
    x, weight = torch.randn(sum(lengths), CHANNELS, **wide), torch.randn(CHANNELS, WINDOW, **wide)
    bias_C = torch.randn(CHANNELS, **wide) if bias else None
    initial_state = torch.randn(len(lengths), WINDOW - 1, CHANNELS, **wide) if initial else None

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Any]:
        return short_convolution(
            x, weight, boundaries(lengths), bias=bias, activation="silu" if silu else None,
            initial_state=initial_state, output_state=state,
        )  # fmt: skip

    def theirs(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Any]:
        out, last = one_by_one(x, weight, lengths, bias, silu, initial_state)
        return out, last if state else None

    leaves = [x, weight, bias_C, initial_state]
    for expected, tensors in zip(results_of(theirs, leaves), results_of(ours, leaves), strict=True):
        torch.testing.assert_close(tensors, expected)


@given(lengths=LENGTHS.filter(lambda lengths: len(lengths) > 1), data=st.data())
@settings(max_examples=25)
def test_a_sequence_does_not_reach_another(lengths: list[int], data: st.DataObject) -> None:
    torch.manual_seed(0)
    changed = data.draw(st.integers(0, len(lengths) - 1))
    x, weight = torch.randn(sum(lengths), CHANNELS), torch.randn(CHANNELS, WINDOW)
    kept = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) != changed
    other = torch.where(kept[:, None], x, float("nan"))

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return short_convolution(x, weight, boundaries(lengths), activation="silu")[0], None

    (out,), (d_x, _) = results_of(run, [x, weight])
    (changed_out,), (changed_d_x, _) = results_of(run, [other, weight])
    assert torch.equal(out[kept], changed_out[kept])
    assert torch.equal(d_x[kept], changed_d_x[kept])


def test_a_state_continues_a_sequence() -> None:
    torch.manual_seed(0)
    x, weight, state = torch.randn(9, CHANNELS), torch.randn(CHANNELS, WINDOW), None
    expected, last = short_convolution(x, weight, boundaries([9]), output_state=True)
    outs = []
    for part in x.split([1, 2, 0, 5, 1]):
        out, state = short_convolution(part, weight, boundaries([len(part)]), initial_state=state, output_state=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), expected)
    assert state is not None
    assert last is not None
    assert torch.equal(state, last)


def test_sums_are_fp32() -> None:
    """The outputs of bf16 inputs and fp32 weights are rounded once."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, CHANNELS).bfloat16(), torch.randn(CHANNELS, WINDOW)
    out, _ = short_convolution(x, weight, boundaries([50]))
    truth, _ = one_by_one(x.double(), weight.double(), [50], None, False, None)
    assert torch.equal(out, truth.bfloat16())


def test_parameters_stay_fp32() -> None:
    layer = ShortConvolution([(1, CHANNELS)], WINDOW, bias=True, dtype=torch.bfloat16)
    expected = {name: p.clone() for name, p in layer.named_parameters()}
    model = nn.Sequential(nn.Linear(2, 2), layer).bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name])
    assert layer.double().weight.dtype == torch.float64
    assert layer.to("meta", torch.bfloat16).weight.is_meta


WRONG = {
    "channels": ({"x_TC": torch.zeros(3, 2)}, r"x \(3, 2\) must be \[T, C\] with C = 5"),
    "state": ({"initial_state": torch.zeros(1, 4, 5)}, r"must be \[N, W - 1, C\] = \(1, 3, 5\)"),
    "activation": ({"activation": "gelu"}, "activation='gelu' is unknown; use 'silu' or None"),
    "boundaries": ({"cu_seqlens": boundaries([2])}, r"cu_seqlens \[0, 2\] must start at 0, .* end at the 3 tokens"),
    "decreasing boundaries": ({"cu_seqlens": torch.tensor([0, 4, 3]).int()}, r"\[0, 4, 3\] must start at 0, never dec"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    arguments = {"x_TC": torch.zeros(3, 5), "weight_CW": torch.zeros(5, 4), "cu_seqlens": boundaries([3])}
    with pytest.raises(ValueError, match=message):
        short_convolution(**{**arguments, **changes})
