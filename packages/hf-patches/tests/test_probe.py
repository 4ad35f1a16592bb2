"""The start-up probe: a patch that does not take effect is found and taken away."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_patches import attention, patch
from hf_patches.testing import random_sequences, tiny_config, tiny_model
from parallel_layers import PackedSequence


def test_a_leak_between_segments_is_found(monkeypatch):
    model = tiny_model("llama")
    real = attention.packed_attention

    def ignores_boundaries(query, key, value, cu_seqlens, max_seqlen, **options):
        whole = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        return real(query, key, value, whole, query.shape[0], **options)

    monkeypatch.setattr(attention, "packed_attention", ignores_boundaries)
    with pytest.raises(RuntimeError, match="segments are not kept apart"):
        patch(model)
    assert "_hf_patches_patch" not in model.__dict__
    model(input_ids=torch.arange(5)[None])


def test_attention_that_looks_ahead_is_found(monkeypatch):
    model = tiny_model("llama")
    real = attention.packed_attention
    monkeypatch.setattr(
        attention, "packed_attention", lambda *args, **options: real(*args, **(options | {"causal": False}))
    )
    with pytest.raises(RuntimeError, match="segments are not kept apart"):
        patch(model)


def test_weights_that_are_not_finite_are_named():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"not finite, nor are its weights model\.layers\.1\.mlp\.up_proj\.weight;"):
        patch(model)


def test_a_layer_that_ignores_our_function_is_found():
    model = tiny_model("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(RuntimeError, match="1 of 2 layers of LlamaForCausalLM"):
        patch(model)


def test_the_probe_leaves_modes_gradients_and_random_numbers_alone():
    model = tiny_model("llama")
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    patch(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_on_the_meta_device_the_first_batch_waits_for_the_probe():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config("llama"))
    patched = patch(model)
    assert "not run yet" in str(patched.report())
    model.to_empty(device="cpu")
    packed = PackedSequence.from_sequences(random_sequences((5, 3), 61))
    with pytest.raises(ValueError, match=r"call Patch.probe\(\)"):
        model(packed=packed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.model.rotary_emb = tiny_model("llama").model.rotary_emb
    patched.probe()
    model(packed=packed)
