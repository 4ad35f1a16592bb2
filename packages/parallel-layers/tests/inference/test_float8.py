"""A decoding view in FP8 computes with rounded weights and tokens, and leaves the model as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers.inference import decoding_attributes, float8_attributes
from parallel_layers.kernels.float8 import quantize_rows
from parallel_layers.linear.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel_layers.model import LoraOptions, add_lora_
from parallel_layers.module import view_of
from parallel_layers.moe import GroupedExperts, MoE, MoEConfig


def view_in_float8(model: nn.Module) -> nn.Module:
    def change(module: nn.Module, view: nn.Module) -> None:
        view.__dict__.update(decoding_attributes(view))
        view.__dict__.update(float8_attributes(view))

    return view_of(model, change)


def rounded(rows: Tensor) -> Tensor:
    q, scales = quantize_rows(rows)
    return q.float() * scales[..., None]


@torch.no_grad()
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_tokens_and_rows_of_weights_are_rounded(kind: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = kind(32, 48, bias=bias), torch.randn(2, 5, 32)
    view = view_in_float8(layer)
    weight = layer.get_parameter("weight")
    expected = F.linear(rounded(x), rounded(weight), layer.bias)
    torch.testing.assert_close(view(x), expected)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))  # the layer itself stays as it is
    assert 0.01 < (view(x) - layer(x)).abs().max() / layer(x).abs().max() < 0.1
    weight.mul_(2)  # copies: later changes need another view
    torch.testing.assert_close(view(x), expected)


@torch.no_grad()
def test_an_adapter_is_added_in_its_own_dtype() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"proj": ColumnParallelLinear(32, 48)}), torch.randn(5, 32)
    add_lora_(model, LoraOptions(rank=2, targets=["proj"]))
    lora = model["proj"].lora
    for factor in lora.parameters():
        factor.normal_()
    adapter = model["proj"](x) - F.linear(x, model["proj"].weight)
    expected = F.linear(rounded(x), rounded(model["proj"].weight)) + adapter
    torch.testing.assert_close(view_in_float8(model)["proj"](x), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("input_major", [False, True])
def test_experts_compute_with_rounded_weights(input_major: bool) -> None:
    torch.manual_seed(0)
    config = MoEConfig(num_experts=4, top_k=2, intermediate_size=16)
    mixture, x = MoE(32, config), torch.randn(7, 32)
    if input_major:
        mixture.experts = GroupedExperts(32, 16, 4, input_major=True)
    view, experts = view_in_float8(mixture), mixture.experts
    order = (lambda weight: weight.transpose(1, 2)) if input_major else (lambda weight: weight)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        torch.testing.assert_close(getattr(view.experts, name), order(rounded(order(weight))))
    assert 1e-3 < (view(x) - mixture(x)).abs().max() / mixture(x).abs().max() < 0.1


def test_what_stays_in_its_dtype() -> None:
    for layer in (ReplicatedLinear(32, 32), ColumnParallelLinear(32, 40), nn.Linear(32, 32), nn.Embedding(32, 32)):
        assert not float8_attributes(layer)
    assert not float8_attributes(GroupedExperts(32, 24, 2))
    frozen = ColumnParallelLinear(32, 32)
    frozen.weight_scale_inv = nn.Parameter(torch.ones(1, 1))
    assert not float8_attributes(frozen)
