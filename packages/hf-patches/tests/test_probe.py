"""The start-up probe: a patch that does not take effect is found and taken away."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForTokenClassification, LlamaForCausalLM

from hf_patches import Patch, attention, patch
from hf_patches.batch import Trace
from hf_patches.testing.tiny_models import random_sequences, tiny_config, tiny_model
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


def test_a_leak_in_a_later_layer_of_a_mixture_is_named(monkeypatch):
    """Behind experts, whose GEMMs round by the number of their tokens, only each layer alone can be exact."""
    model = tiny_model("qwen3_moe")
    real = attention._attend

    def ignores_boundaries(module, plan, *operands):
        if module.layer_idx == 1:
            whole = torch.tensor([0, plan.num_tokens], dtype=torch.int32)
            plan = replace(plan, cu_seqlens=whole, max_seqlen=plan.num_tokens)
        return real(module, plan, *operands)

    monkeypatch.setattr(attention, "_attend", ignores_boundaries)
    with pytest.raises(RuntimeError, match=r"and model\.layers\.1\.self_attn alone lets segments influence each other"):
        patch(model)


def zero_head(kind):
    """A model whose outputs are the same for any tokens."""
    if kind in ("value", "scores"):
        model = AutoModelForTokenClassification.from_config(tiny_config("llama", num_labels=1))
        torch.nn.init.zeros_(model.score.weight)
        return model, {"value_head": True} if kind == "value" else {"fused_head": False}
    model = tiny_model("gemma2", tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model, {"fused_head": kind == "log-probs"}


@pytest.mark.parametrize("kind", ["value", "scores", "log-probs", "logits"])
def test_heads_of_zeros_are_judged_by_what_they_read(monkeypatch, kind):
    model, options = zero_head(kind)
    patched = patch(model, **options)
    assert patched.probe().moved > 0
    assert patched.probe().leak == 0
    outputs = model.eval()(packed=PackedSequence.from_sequences(random_sequences((5, 3), 61)))
    assert all(len(x.unique(dim=0)) <= 2 for x in outputs if x is not None)  # a last token has no log-prob
    patched.remove()
    real = attention.packed_attention
    monkeypatch.setattr(
        attention, "packed_attention", lambda *args, **options: real(*args, **(options | {"causal": False}))
    )
    with pytest.raises(RuntimeError, match="segments are not kept apart"):
        patch(model, **options)


def test_only_heads_of_zeros_may_return_the_same_for_any_tokens():
    model, _ = zero_head("log-probs")
    patched = patch(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e-3
    assert patched.probe().moved > 0
    model.lm_head.forward = lambda hidden, own=model.lm_head.forward: own(torch.zeros_like(hidden))
    with pytest.raises(RuntimeError, match=r"moved it by 0, other tokens by 0 \(allowed: 0\)"):
        patched.probe()
    assert Patch.of(model) is patched


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


def test_a_kernel_with_nan_is_as_wrong_as_one_of_another_dtype():
    trace, right = Trace(), torch.ones(2)
    for kernel, result in (("right", right), ("nan", torch.tensor([1.0, torch.nan])), ("bf16", right.bfloat16())):
        trace.compare(kernel, right, right)
        trace.compare(kernel, result, right)
        trace.compare(kernel, right, right)
    assert trace.kernel_errors == {"right": 0.0, "nan": math.inf, "bf16": math.inf}


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
