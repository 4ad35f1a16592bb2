"""Which experts the kernels for few rows compute; what decoding views compute is in test_layer.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel_layers.model import LoraOptions, add_lora_
from parallel_layers.moe import ClampedSwiGLU, GroupedExperts, decoding
from parallel_layers.moe.decoding import takes_few_rows


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "use_triton", lambda *_: True)


def test_plain_weights_of_a_known_activation_are_taken() -> None:
    x = torch.zeros(2, 8)
    assert takes_few_rows(GroupedExperts(8, 4, 2), x)
    assert takes_few_rows(GroupedExperts(8, 4, 2, activation=ClampedSwiGLU(alpha=1.3, limit=1.5), bias=True), x)
    assert not takes_few_rows(GroupedExperts(8, 4, 2, activation="gelu"), x)
    assert not takes_few_rows(GroupedExperts(8, 4, 2), x.bfloat16())


def test_adapters_float8_and_frozen_scales_are_not() -> None:
    x, experts = torch.zeros(2, 8), GroupedExperts(8, 4, 2)
    experts.product = lambda rows, weight, counts, **_: rows @ weight[0].T  # as `with_float8` sets one
    assert not takes_few_rows(experts, x)
    adapted = nn.ModuleDict({"experts": GroupedExperts(8, 4, 2)})
    add_lora_(adapted, LoraOptions(rank=2, targets=["experts.down_proj"]))
    assert not takes_few_rows(adapted["experts"], x)
    scaled = GroupedExperts(8, 4, 2)
    scaled.gate_up_proj_scale_inv = nn.Parameter(torch.ones(2, 1, 1))
    assert not takes_few_rows(scaled, x)
