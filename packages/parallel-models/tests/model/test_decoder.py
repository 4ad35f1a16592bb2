"""Recomputation: what runs twice, and that gradients are the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers import ModelConfig, PackedSequence
from parallel_models import CausalLM, EngineOptions

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def run(recompute: Any) -> tuple[Counter[str], list[Tensor]]:
    """How often attention and MLP of each layer ran, and the gradients."""
    torch.manual_seed(0)
    model = CausalLM(ModelConfig.from_hf(CONFIG), recompute=recompute)
    torch.nn.init.normal_(model.lm_head.weight)
    calls: Counter[str] = Counter()
    for number, layer in model.model.layers.items():
        for name in ("qkv_proj", "down_proj"):
            part = layer.self_attn.qkv_proj if name == "qkv_proj" else layer.mlp.down_proj
            part.register_forward_pre_hook(lambda *_, key=f"{number} {name}": calls.update([key]))
    packed = PackedSequence.from_sequences([torch.arange(9), torch.arange(4)])
    model.log_probs(packed).log_probs.sum().backward()
    return calls, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("recompute", "twice"),
    [
        ("full", {f"{layer} {part}" for layer in range(3) for part in ("qkv_proj", "down_proj")}),
        ("selective", {f"{layer} down_proj" for layer in range(3)}),
        ([1], {"1 qkv_proj", "1 down_proj"}),
    ],
    ids=["full", "selective", "one layer"],
)
def test_what_is_asked_for_runs_twice_and_gradients_are_the_same_bits(recompute: Any, twice: set[str]) -> None:
    once, expected = run(None)
    calls, gradients = run(recompute)
    assert set(once.values()) == {1}
    assert {name for name, count in calls.items() if count == 2} == twice
    assert max(calls.values()) == 2
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("recompute", ["all", True, 1])
def test_an_unknown_choice_is_refused(recompute: Any) -> None:
    with pytest.raises(ValueError, match=f"recompute={recompute!r} is unknown; use 'full', 'selective'"):
        EngineOptions(recompute=recompute)


def test_layers_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute: there are no layers \[3\]; the model has 0..2"):
        CausalLM(ModelConfig.from_hf(CONFIG), recompute=[1, 3])
