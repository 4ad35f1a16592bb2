"""The rule of weight decay."""

import pytest
import torch

from parallel_layers.training.weight_decay import has_weight_decay


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("model.embed_tokens.weight", (8, 4), True),
        ("mlp.experts.gate_up_proj", (2, 4, 8), True),
        ("mlp.experts.gate_up_proj_bias", (2, 8), False),
        ("self_attn.q_proj.bias", (4,), False),
        ("self_attn.sinks", (2,), False),
        ("model.norm.weight", (4,), False),
    ],
)
def test_matrices_alone_decay(name: str, shape: tuple[int, ...], decays: bool) -> None:
    assert has_weight_decay(name, torch.empty(shape, device="meta")) == decays
