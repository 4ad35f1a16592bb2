"""Gradients of bf16 weights that backwards write in fp32 and add in place, over micro-batches."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import cpu_quack
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import ColumnParallelLinear, Placement, RowParallelLinear, VocabParallelHead
from parallel_layers.moe import GroupedExperts, experts
from parallel_layers.testing import RankPool
from parallel_layers.training.weight_gradients import sum_in_place_

TOKENS, HIDDEN, OUTPUTS = 24, 16, 40
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
Run = Callable[[nn.Module, Tensor], Tensor]


def of_experts(layer: nn.Module, x: Tensor) -> Tensor:
    counts = torch.tensor([3, 0, len(x) - 4, 1], device=x.device)
    return layer.compute(x, torch.ones(len(x), dtype=x.dtype, device=x.device), counts)


def of_head(head: nn.Module, x: Tensor) -> Tensor:
    return head(x, torch.arange(len(x), device=x.device) % head.vocab_size).log_probs


# From hidden size and outputs.
LAYERS: dict[str, tuple[Callable[..., nn.Module], Run]] = {
    "column": (ColumnParallelLinear, lambda layer, x: layer(x)),
    "biased column": (partial(ColumnParallelLinear, bias=True), lambda layer, x: layer(x)),
    "row": (RowParallelLinear, lambda layer, x: layer(x)),
    "experts": (partial(GroupedExperts, num_experts=4), of_experts),
    "input-major experts": (partial(GroupedExperts, num_experts=4, input_major=True), of_experts),
    "head": (VocabParallelHead, of_head),
}


def gradients(layer: nn.Module, run: Run, x: Tensor, *, in_place: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Return the gradients of three micro-batches, and the number of those that autograd got, by parameter."""
    layer, given = copy.deepcopy(layer), Counter[str]()
    for name, parameter in layer.named_parameters():
        parameter.grad_dtype = torch.float32

        def count(gradient: Tensor | None, name: str = name) -> None:
            given[name] += gradient is not None

        parameter.register_hook(count)
    if in_place:
        sum_in_place_(layer.parameters())
    for seed in range(3):
        torch.manual_seed(seed)
        y = run(layer, x.roll(seed, 0))
        y.backward(torch.randn(y.shape, device=y.device).bfloat16().to(y.dtype))
    return [parameter.grad for parameter in layer.parameters()], dict(given)


def check(name: str, layer: nn.Module, x: Tensor) -> dict[str, int]:
    """Compare with the same layer in fp32, per element; return which gradients autograd got."""
    run = LAYERS[name][1]
    exact, _ = gradients(copy.deepcopy(layer).float(), lambda layer, x: run(layer, x.float()), x, in_place=False)
    usual, of_autograd = gradients(layer, run, x, in_place=False)
    sums, given = gradients(layer, run, x, in_place=True)
    assert set(of_autograd.values()) == {3}
    for ours, other, truth in zip(sums, usual, exact, strict=True):
        assert ours.dtype == torch.float32
        scale = float(truth.abs().max())
        torch.testing.assert_close(ours, truth, rtol=0.02, atol=0.02 * scale)
        torch.testing.assert_close(ours, other, rtol=0.01, atol=0.01 * scale)
    return given


@pytest.mark.parametrize("name", [name for name in LAYERS if "biased" not in name])
def test_further_micro_batches_are_added_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd gets the first gradient alone."""
    monkeypatch.setattr(experts, "is_one_kernel", lambda weight: True)
    monkeypatch.setattr(experts, "is_faster", lambda weight: True)
    layer = LAYERS[name][0](HIDDEN, OUTPUTS, **BF16)
    with cpu_quack.dense():
        assert set(check(name, layer, torch.randn(TOKENS, HIDDEN).bfloat16()).values()) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_on_a_gpu(name: str) -> None:
    """Sizes that quack multiplies on Hopper, where it is installed; else experts' gradients are summed by autograd."""
    torch.manual_seed(0)
    layer = LAYERS[name][0](4096, 1024 if "experts" in name else 4096, **BF16, device="cuda")
    given = check(name, layer, torch.randn(16384, 4096, device="cuda").bfloat16())
    adds = "experts" not in name or experts.is_faster(layer.gate_up_proj)
    assert {number for parameter, number in given.items() if parameter != "bias"} == ({1} if adds else {3})


def test_fp32_gradients_are_rounded_once() -> None:
    """A sum of products of bf16 numbers that bf16 cannot hold."""
    layer = ColumnParallelLinear(8, 8, **BF16)
    layer.weight.grad_dtype = torch.float32
    x = torch.ones(257, 8).bfloat16()
    with cpu_quack.dense():
        layer(x).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.unique().tolist() == [257.0]


def divided(group: ProcessGroup) -> list[list[Tensor]]:
    placement = Placement(group, sequence_parallel=True)
    torch.manual_seed(1)
    layers = nn.Sequential(
        ColumnParallelLinear(HIDDEN, 32, placement=placement, **BF16),
        RowParallelLinear(32, HIDDEN, placement=placement, **BF16),
    )
    x = torch.randn(TOKENS // 2, HIDDEN).bfloat16()
    return [gradients(layers, lambda layer, x: layer(x), x, in_place=in_place)[0] for in_place in (False, True)]


def test_divided_linear_layers(ranks: RankPool) -> None:
    for usual, in_place in ranks.run(divided, world=2):
        for one, other in zip(usual, in_place, strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=0.01 * float(one.abs().max()))
