"""One token at a time, in place: outputs and states are those of whole sequences; other rows stay as they are."""

from collections.abc import Callable

import pytest
import torch
from token_recurrence import boundaries
from torch import Tensor

from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule
from parallel_layers.linear_attention.recurrent import convolution_step_, gated_delta_step_, state_space_step_
from parallel_layers.linear_attention.state_space import state_space_dual

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
# The last sequence stops after half of the steps.
LENGTHS, FIRST = [6, 6, 3], 1
Step = Callable[[Tensor, list[Tensor], Tensor], Tensor]


def check_steps(step: Step, tokens: list[Tensor], initial: Tensor, whole: tuple[Tensor, Tensor | None]) -> None:
    """Compare the steps of three rows from row `FIRST` with the outputs and states of the packed sequences."""
    other = torch.full_like(initial[:1], 7)
    states, expected = torch.cat([other, initial, other]), whole[0].split(LENGTHS)
    for t in range(max(LENGTHS)):
        live = torch.tensor([t < length for length in LENGTHS])
        rows = [sum(LENGTHS[:n]) + min(t, length - 1) for n, length in enumerate(LENGTHS)]
        # A sequence that has stopped spoils nothing.
        inputs = [x[rows].masked_fill(~live.view(-1, *(1,) * (x.dim() - 1)), torch.nan) for x in tokens]
        results = step(states, inputs, live)
        for n in live.nonzero()[:, 0].tolist():
            torch.testing.assert_close(results[n], expected[n][t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(states[FIRST:-1], whole[1], rtol=1e-10, atol=1e-12)
    assert torch.equal(states[[0, -1]], torch.cat([other, other]))


def draw(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def delta_tokens(per_channel: bool) -> list[Tensor]:
    torch.manual_seed(0)
    decay = draw(sum(LENGTHS), VALUE_HEADS, *[KEY_DIM] * per_channel)
    q, k = draw(2, sum(LENGTHS), KEY_HEADS, KEY_DIM)
    return [q, k, draw(sum(LENGTHS), VALUE_HEADS, VALUE_DIM), -decay.exp(), draw(sum(LENGTHS), VALUE_HEADS).sigmoid()]


@pytest.mark.parametrize("per_channel", [False, True])
def test_gated_delta_step(per_channel: bool) -> None:
    tokens, bounds = delta_tokens(per_channel), boundaries(LENGTHS)
    initial = draw(len(LENGTHS), VALUE_HEADS, KEY_DIM, VALUE_DIM)
    whole = gated_delta_rule(*tokens, bounds, normalize=True, initial_state=initial, output_state=True)

    def step(states: Tensor, inputs: list[Tensor], live: Tensor) -> Tensor:
        return gated_delta_step_(states, *inputs, first=FIRST, normalize=True, live_M=live)

    check_steps(step, tokens, initial, whole)


def test_state_space_step() -> None:
    torch.manual_seed(0)
    x, steps = draw(sum(LENGTHS), VALUE_HEADS, VALUE_DIM), draw(sum(LENGTHS), VALUE_HEADS).exp()
    b, c = draw(2, sum(LENGTHS), KEY_HEADS, KEY_DIM)
    rates, skip, initial = -draw(VALUE_HEADS).exp(), draw(VALUE_HEADS), draw(3, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    options = {"D_V": skip, "initial_state": initial, "output_state": True}
    whole = state_space_dual(x, steps, rates, b, c, boundaries(LENGTHS), **options)

    def step(states: Tensor, inputs: list[Tensor], live: Tensor) -> Tensor:
        x, steps, *others = inputs
        return state_space_step_(states, x, steps, rates, *others, first=FIRST, D_V=skip, live_M=live)

    check_steps(step, [x, steps, b, c], initial, whole)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_step(activation: str | None) -> None:
    torch.manual_seed(0)
    x, weight, bias, initial = draw(sum(LENGTHS), 5), draw(5, 4), draw(5), draw(len(LENGTHS), 3, 5)
    options = {"bias": bias, "activation": activation}
    whole = short_convolution(x, weight, boundaries(LENGTHS), **options, initial_state=initial, output_state=True)

    def step(states: Tensor, inputs: list[Tensor], live: Tensor) -> Tensor:
        return convolution_step_(states, *inputs, weight, **options, first=FIRST, live_M=live)

    check_steps(step, [x], initial, whole)


def test_all_rows_are_live_by_default() -> None:
    tokens = [x[:2] for x in delta_tokens(per_channel=False)]
    states = draw(2, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    whole = gated_delta_rule(*tokens, boundaries([1, 1]), scale=0.5, initial_state=states, output_state=True)
    results = gated_delta_step_(states, *tokens, scale=0.5)
    torch.testing.assert_close((results, states), whole, rtol=1e-10, atol=1e-12)
