"""Frozen weights in FP8 compute as the dequantised weights, in every path of the layers, and keep no dense copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_layers.linear.block_scaled import dense_weight, dequantize, hold_in_float8_
from parallel_layers.linear.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel_layers.model.lora import add_lora_
from parallel_layers.model.options import LoraOptions
from parallel_layers.moe.experts import GroupedExperts

SIDES = {"0.weight": (8, 4), "1.weight": (4, 8), "2.weight": (2, 2)}


def layers(dtype: torch.dtype, options: LoraOptions | None) -> nn.Sequential:
    torch.manual_seed(0)
    kinds: list[tuple[Any, int, int]] = [
        (ColumnParallelLinear, 16, 24), (RowParallelLinear, 24, 16), (ReplicatedLinear, 16, 12)
    ]  # fmt: skip
    model = nn.Sequential(*(kind(fan_in, fan_out, bias=True, dtype=dtype) for kind, fan_in, fan_out in kinds))
    if options is None:
        return model.requires_grad_(False)
    add_lora_(model, options)
    for layer in model:
        nn.init.normal_(layer.lora.B, 0, 0.3)
    return model


def held(model: nn.Module, sides: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Put random FP8 weights into a model, and return their dense values."""
    hold_in_float8_(model, sides)
    generator, values = torch.Generator().manual_seed(1), {}
    for path in sides:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        with torch.no_grad():
            weight, scales = owner.get_parameter(name), owner.get_parameter(f"{name}_scale_inv")
            weight.copy_((torch.randn(weight.shape, generator=generator) * 100).to(weight.dtype))
            scales.copy_(torch.rand(scales.shape, generator=generator) / 300)
        values[path] = dense_weight(owner, name).clone()
    return values


def run(model: nn.Module, *args: Tensor) -> list[Tensor]:
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None), args[0].grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [None, LoraOptions(rank=2), LoraOptions(rank=2, dropout=0.5)])
def test_layers_give_the_bits_of_dense_weights(dtype: torch.dtype, options: LoraOptions | None) -> None:
    model, plain = layers(dtype, options), layers(dtype, options)
    plain.load_state_dict(held(model, SIDES), strict=False)
    found, kept = [], list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for each in (plain, model):
        kept.clear()
        torch.manual_seed(5)
        x = torch.randn(6, 16).to(dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found.append(run(each, x))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    shapes = {tuple(p.shape) for p in model.parameters() if p.dtype == torch.float8_e4m3fn}
    shapes |= {shape[::-1] for shape in shapes}
    assert {tensor.dtype for tensor in kept if tuple(tensor.shape) in shapes} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("input_major", [False, True])
def test_experts_give_the_bits_of_dense_weights(input_major: bool) -> None:
    sides, found = {"gate_up_proj": (4, 2), "down_proj": (2, 4)}, []
    experts, plain = (GroupedExperts(16, 8, 4, input_major=input_major) for _ in range(2))
    for model in (experts, plain):
        add_lora_(model, LoraOptions(rank=2, targets=["gate_up_proj", "down_proj"]))
        torch.manual_seed(3)
        for lora in (model.gate_up_proj_lora, model.down_proj_lora):
            for factor in (lora.A, lora.B):
                nn.init.normal_(factor, 0, 0.3)
    plain.load_state_dict(held(experts, sides), strict=False)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    weights = torch.rand(10, 2)
    for model in (experts, plain):
        torch.manual_seed(4)
        found.append(run(model, torch.randn(10, 16).requires_grad_(), chosen, weights))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_value_is_number_times_scale_rounded_once() -> None:
    torch.manual_seed(0)
    numbers, scales = (torch.randn(8, 12) * 50).to(torch.float8_e4m3fn), torch.rand(2, 3)
    wide = numbers.float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(numbers, scales, dtype), wide.to(dtype))
        assert torch.equal(dequantize(numbers.t(), scales.t(), dtype), wide.t().to(dtype))


@pytest.mark.slow
def test_layers_in_fp8_compile_whole() -> None:
    model, found = layers(torch.float32, LoraOptions(rank=2)), []
    held(model, SIDES)
    for each in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        found.append(run(each, torch.randn(6, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("trained", "sides", "text"),
    [
        (True, {"0.weight": (8, 4)}, "0.weight is trained, and only frozen weights stay in FP8; call add_lora_ first"),
        (False, {"0.weight": (5, 4)}, "blocks of 5 x 4 do not divide 0.weight of 24 x 16; use divisors of both"),
        (False, {"0.bias": (1, 1)}, "0.bias of ColumnParallelLinear is no weight of a linear or of experts"),
    ],
)
def test_mistakes_are_refused(trained: bool, sides: dict[str, tuple[int, int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hold_in_float8_(layers(torch.float32, None).requires_grad_(trained), sides)
