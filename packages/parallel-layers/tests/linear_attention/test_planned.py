"""The tensors that recurrent layers save and return on the meta device, in a plan for a GPU with fla-core."""

from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels import planned_for
from parallel_layers.linear_attention import gated_delta_rule, short_convolution

TOKENS, KEY_HEADS, HEADS, DIM, SIZE = 100, 2, 4, 16, 24
META = {"dtype": torch.bfloat16, "device": "meta"}


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_delta_rule_saves_the_products_inside_chunks(per_channel: bool) -> None:
    saved: list[tuple[int, ...]] = []
    shapes = [(TOKENS, KEY_HEADS, DIM)] * 2 + [(TOKENS, HEADS, SIZE)]
    arguments = [torch.empty(shape, requires_grad=True, **META) for shape in shapes]
    gates = (TOKENS, HEADS, DIM) if per_channel else (TOKENS, HEADS)
    arguments += [torch.empty(shape, device="meta", requires_grad=True) for shape in (gates, (TOKENS, HEADS))]
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x)
    with planned_for("cuda"), hooks:
        out, state = gated_delta_rule(*arguments, bounds, normalize=True, output_state=True)
    products = [(TOKENS, HEADS, 64)] * (1 + per_channel)
    assert sorted(saved) == sorted([*shapes, gates, (TOKENS, HEADS), *products])
    assert out.shape == shapes[2]
    assert state is not None
    assert state.shape == (2, HEADS, DIM, SIZE)
    gradients = torch.autograd.grad(out, arguments, torch.empty_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in arguments]


def test_the_convolution_saves_its_arguments_alone() -> None:
    saved: list[tuple[int, ...]] = []
    x, weight, bias = (torch.empty(s, requires_grad=True, **META) for s in ((TOKENS, 6), (6, 4), (6,)))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x)
    with planned_for("cuda"), hooks:
        out, _ = short_convolution(
            x, weight, torch.empty(3, dtype=torch.int32, device="meta"), bias=bias, activation="silu"
        )
    assert saved == [(TOKENS, 6), (6, 4), (6,)]
    gradients = torch.autograd.grad(out, [x, weight, bias], torch.empty_like(out))
    assert [g.shape for g in gradients] == [x.shape, weight.shape, bias.shape]
