"""Decoding views of several layers: the addition behind a layer computes the norm of the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_layers.inference import decoding_attributes
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.module import view_of
from parallel_layers.norm.rms import RMSNorm

SIZES: dict[str, Any] = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24}
BOUNDS = torch.tensor([0, 5], dtype=torch.int32)


def outputs(layers: nn.ModuleDict, hidden: Tensor, between: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the hidden states behind each layer; `between` changes them behind the second."""
    found = []
    for number, layer in enumerate(layers.values()):
        hidden = layer(hidden, None, BOUNDS, 5)
        found.append(hidden)
        hidden = between(hidden) if number == 1 else hidden
    return found


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        ({}, [False, True, True]),
        ({"norm_placement": "parallel"}, [False, True, True]),
        ({"norm_placement": "sandwich"}, [False] * 3),
        ({"norm_placement": "post"}, [False] * 3),
        ({"normalization": "layer"}, [False] * 3),
        ({"residual_multiplier": 0.5}, [False] * 3),
        ({"output_scale": True}, [False] * 3),
    ],
)
def test_the_addition_computes_the_next_norm(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ahead: list[bool]
) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(**SIZES, **changes)
    layers = nn.ModuleDict({str(number): DecoderLayer(config, layer_number=number) for number in range(3)})
    hidden, added = torch.randn(5, 16), list[Tensor]()
    plain = RMSNorm.add_and_norm

    def add_and_norm(norm: RMSNorm, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is not None:
            added.append(norm.weight)
        return plain(norm, x, residual)

    with torch.no_grad():
        expected = outputs(layers, hidden, lambda x: x)
        monkeypatch.setattr(RMSNorm, "add_and_norm", add_and_norm)
        view = view_of(layers, lambda _, copy: copy.__dict__.update(decoding_attributes(copy)))
        outputs(view, hidden + 1, lambda x: x)  # nothing of other tokens stays
        added.clear()
        actual = outputs(view, hidden, lambda x: x)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    first_norms = [getattr(layer, "input_layernorm", None) for layer in layers.values()]
    assert [norm is not None and any(x is norm.weight for x in added) for norm in first_norms] == ahead


def test_a_stream_that_changes_between_layers_is_normed_again() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(**SIZES)
    layers = nn.ModuleDict({str(number): DecoderLayer(config, layer_number=number) for number in range(3)})
    view = view_of(layers, lambda _, copy: copy.__dict__.update(decoding_attributes(copy)))
    hidden = torch.randn(5, 16)
    with torch.no_grad():
        expected = outputs(layers, hidden, lambda x: 2 * x)
        actual = outputs(view, hidden, lambda x: 2 * x)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
