from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.kernels.few_rows import experts_of_few_rows, place_rows
from parallel_layers.kernels.float8 import quantize_rows
from parallel_layers.kernels.gated_experts import GLU

GPT_OSS = GLU(1.702, 7.0, 1.0, alternating=True)


@pytest.mark.parametrize(("first", "num_local"), [(0, 5), (2, 3), (0, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rows_are_placed_by_expert_and_in_order(device: torch.device, tokens: int, first: int, num_local: int) -> None:
    torch.manual_seed(tokens)
    experts = torch.rand(tokens, 5, device=device).topk(4).indices
    places = place_rows(experts, first, num_local)
    flat = experts.flatten() - first
    kept = (flat >= 0) & (flat < num_local)
    order = torch.where(kept, flat, num_local).argsort(stable=True)
    assert torch.equal(places.rows[: kept.sum()].long(), order[: kept.sum()])
    assert torch.equal(places.begins.diff().long(), torch.bincount(flat[kept], minlength=num_local))
    expected = torch.where(kept, order.argsort(), -1)
    assert torch.equal(places.of_rows.long(), expected)


def values(rows: Tensor, scales: Tensor) -> Tensor:
    return rows.double() * scales[..., None]


def expected_sum(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    glu: GLU,
    biases: list[Tensor] | None,
    rounded: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """Compute every token with every expert of its choice, in fp64, and round what goes into `down`: `[T, H]`."""
    x, weights, gate_up, down = (operand.double() for operand in (x, weights, gate_up, down))
    out = torch.zeros_like(x)
    for token, choice in experts.new_ones(experts.shape).nonzero().tolist():
        expert = int(experts[token, choice])
        if expert < 0 or expert >= len(gate_up):
            continue
        both = F.linear(x[token], gate_up[expert])
        if biases is not None:
            both = both + biases[0][expert].double()
        gate, up = (both[::2], both[1::2]) if glu.alternating else both.chunk(2)
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
        inner = rounded(weights[token, choice] * gate * torch.sigmoid(glu.alpha * gate) * (up + glu.offset))
        out[token] += F.linear(inner, down[expert])
        if biases is not None:
            out[token] += weights[token, choice] * biases[1][expert].double()
    return out


def random_choices(
    tokens: int, num_experts: int, hidden: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Return tokens `[T, H]`, three experts of each `[T, 3]`, and their weights `[T, 3]`."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    return [x, torch.rand(tokens, num_experts, device=device).topk(3).indices, torch.rand(tokens, 3, device=device)]


def random_weights(hidden: int, inner: int, device: torch.device) -> list[Tensor]:
    """Return gate and up `[4, 2I, H]`, down `[4, H, I]`, and their biases, for four experts."""
    gate_up = torch.randn(4, 2 * inner, hidden, device=device) * hidden**-0.5
    down = torch.randn(4, hidden, inner, device=device) * inner**-0.5
    return [gate_up, down, *(torch.randn(4, width, device=device) for width in (2 * inner, hidden))]


@pytest.mark.parametrize(
    ("tokens", "sizes", "glu", "biased", "input_major"),
    [
        (9, (64, 128), GLU(), False, False),
        (1, (72, 40), GLU(), False, False),
        (70, (128, 64), GPT_OSS, True, True),
        (9, (40, 72), GPT_OSS, True, False),
        (130, (64, 64), GLU(), True, True),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_equal_to_each_expert_alone(
    device: torch.device,
    unit: dict[torch.dtype, float],
    tokens: int,
    sizes: tuple[int, int],
    glu: GLU,
    biased: bool,
    input_major: bool,
    half: bool,
) -> None:
    """Six experts, of which this rank has four."""
    dtype = torch.float32
    if half:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter cannot multiply bf16
    torch.manual_seed(0)
    x, experts, weights = random_choices(tokens, 6, sizes[0], device, dtype)
    gate_up, down, *biases_of_both = (weight.to(dtype) for weight in random_weights(*sizes, device))
    biases = biases_of_both if biased else None
    stored = [w.transpose(1, 2).contiguous() if input_major else w for w in (gate_up, down)]
    gate_up_bias, down_bias = biases if biases is not None else (None, None)
    out = experts_of_few_rows(
        x, experts, weights, *stored, glu, first=1, input_major=input_major, gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )  # fmt: skip
    exact = expected_sum(x, experts - 1, weights, gate_up, down, glu, biases)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 4 * unit[torch.bfloat16 if half else dtype] * exact.abs().max() + 1e-5


@pytest.mark.parametrize(
    ("tokens", "sizes", "glu", "biased"), [(9, (64, 128), GLU(), False), (70, (48, 40), GPT_OSS, True)]
)
def test_rows_of_weights_in_float8_have_scales(
    device: torch.device,
    unit: dict[torch.dtype, float],
    tokens: int,
    sizes: tuple[int, int],
    glu: GLU,
    biased: bool,
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    torch.manual_seed(0)
    x, experts, weights = random_choices(tokens, 4, sizes[0], device, dtype)
    wide_gate_up, wide_down, *biases_of_both = random_weights(*sizes, device)
    (gate_up, gate_up_scales), (down, down_scales) = map(quantize_rows, (wide_gate_up, wide_down))
    biases = [bias.to(dtype) for bias in biases_of_both] if biased else None
    gate_up_bias, down_bias = biases if biases is not None else (None, None)
    out = experts_of_few_rows(
        x, experts, weights, gate_up, down, glu, gate_up_scales=gate_up_scales, down_scales=down_scales,
        gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip

    def rounded(rows: Tensor) -> Tensor:
        return values(*quantize_rows(rows.to(dtype)))

    dense = values(gate_up, gate_up_scales), values(down, down_scales)
    exact = expected_sum(rounded(x), experts, weights, *dense, glu, biases, rounded)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 4 * unit[torch.bfloat16] * exact.abs().max() + 1e-5
