"""Tiled MLPs: the same numbers for any count of tokens and tiles."""

import pytest
import torch
from comparing import assert_gradients_equal, gradients, scalar_loss
from hypothesis import given, settings, strategies as st
from torch import nn

from hf_patches import patch
from hf_patches.memory import find_mlps
from hf_patches.testing.tiny_models import (
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence
from parallel_layers.memory import TiledMLP


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(0, 17), tiles=st.integers(1, 20))
def test_any_number_of_tokens_and_tiles(tokens, tiles):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 4)).double()
    plain, tiled = (torch.randn(1, tokens, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    tiled.data.copy_(plain.data)
    upstream = torch.randn(1, tokens, 4, dtype=torch.float64)
    results = []
    for x, forward in ((plain, mlp), (tiled, TiledMLP(mlp.forward, tiles).forward)):
        mlp.zero_grad()
        output = forward(x)
        output.backward(upstream)
        results.append([output, x.grad, *(p.grad.clone() for p in mlp.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("model_type", "checkpointing"),
    [("llama", True), ("phi3", False), pytest.param("deepseek_v3", True, marks=pytest.mark.slow)],
)
def test_two_accumulations_equal_untiled(model_type, checkpointing):
    results = []
    for tiles in (None, 3):
        model = tiny_model(model_type)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        patch(model, tiled_mlp=tiles)
        for seed in (0, 1):
            packed = PackedSequence.from_sequences(random_sequences((11, 1, 7), 61, seed))
            scalar_loss(model(packed=packed)).backward()
        results.append(gradients(model))
    assert_gradients_equal(results[1], results[0])


def test_only_one_tiles_activations_live_at_a_time():
    model = tiny_model("llama")
    patch(model, tiled_mlp=4)
    rows = []
    for mlp in find_mlps(model.model):
        mlp.down_proj.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[0]))
    packed = PackedSequence.from_sequences(random_sequences((11, 7), 61))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = scalar_loss(model(packed=packed))
    assert set(rows) == {4, 5}
    intermediate = model.config.intermediate_size
    assert not any(x.shape[-1:] == (intermediate,) and x.ndim > 1 for x in saved)
    loss.backward()


class Adapted(nn.Module):
    """A linear as peft wraps it: a module around an nn.Linear."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    def forward(self, x):
        return self.base_layer(x)


def test_an_mlp_with_an_adapter_is_tiled_too():
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj = Adapted(model.model.layers[1].mlp.down_proj)
    report = patch(model, tiled_mlp=2).report()
    tiled = [change.where for change in report.changes if change.what == "MLP in 2 tiles of tokens"]
    assert tiled == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_refusals():
    with pytest.raises(ValueError, match="tiled_mlp=0 must be a number of tiles, at least 1"):
        patch(tiny_model("llama"), tiled_mlp=0)
    with pytest.raises(ValueError, match="GptOssForCausalLM has no dense MLP"):
        patch(tiny_model("gpt_oss"), tiled_mlp=2)
    with pytest.raises(ValueError, match="recompute='all' is unknown; use 'full', 'selective'"):
        patch(tiny_model("llama"), recompute="all")
