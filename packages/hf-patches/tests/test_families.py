"""Every family: packed against one by one, and what is refused by name."""

import pytest
import torch
from comparing import NAMED, TEXT, assert_gradients_equal, gradients, scalar_loss
from transformers import GPT2Config

from hf_patches import patch
from hf_patches.families import vision_of
from hf_patches.families.refused import REFUSED_MODEL_TYPES, longest_exact_sequence
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    tiny_config,
    tiny_model,
)
from parallel_layers import PackedSequence, next_token_labels

LENGTHS = (11, 1, 17, 6)


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", TEXT)
def test_packed_equals_one_by_one(model_type):
    model = tiny_model(model_type)
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    expected = one_by_one(model, sequences, 0.8)
    scalar_loss(expected).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    packed = PackedSequence.from_sequences(sequences)
    patched = patch(model, fused_head=False)
    logits = torch.cat([scores.log_softmax(-1) for scores in packed.split(model(packed=packed).logits / 0.8)])
    labels = next_token_labels(packed)
    chosen = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    torch.testing.assert_close(chosen, expected.log_probs, atol=1e-5, rtol=0)
    patched.remove()
    patch(model)
    output = model(packed=packed, temperature=0.8)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=3e-5, rtol=0)
    scalar_loss(output).backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    # Nothing hides behind a zero: every parameter has a gradient.
    assert all(gradient.abs().max() > 0 for gradient in expected_gradients.values())


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in ("llama", "deepseek_v3", "qwen2_vl") else pytest.mark.slow)
        for name in NAMED
    ],
)
def test_a_tiny_model_is_a_function_of_its_seed(model_type):
    torch.manual_seed(1)
    first = tiny_model(model_type, seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = tiny_model(model_type, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, second.state_dict()[name]) for name, x in first.state_dict().items())


@pytest.mark.parametrize("model_type", sorted(REFUSED_MODEL_TYPES))
def test_refused_model_types_say_why(model_type):
    class Config:
        pass

    Config.model_type = model_type
    with pytest.raises(ValueError, match=f"model_type='{model_type}' (has|masks|chooses|lets|convolves)"):
        vision_of(Config())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("linear_attention", "recurrent"), ("chunked_attention", "chunks"), ("hybrid_sliding", "convolves")],
)
def test_refused_layer_types_say_why(kind, reason):
    config = tiny_config("llama")
    config.layer_types = ["full_attention", kind]
    with pytest.raises(ValueError, match=f"layer_types='{kind}' .*{reason}"):
        vision_of(config)


def test_other_refusals():
    with pytest.raises(ValueError, match="output_router_logits=True"):
        vision_of(tiny_config("mixtral", output_router_logits=True))
    with pytest.raises(ValueError, match="both directions"):
        vision_of(tiny_config("gemma3_text", use_bidirectional_attention=True))
    # Of text alone none sees a later token.
    assert vision_of(tiny_config("gemma4_text", use_bidirectional_attention="vision")) is None
    with pytest.raises(ValueError, match=r"'gpt2' is not among .*llama.*qwen2"):
        vision_of(GPT2Config())


def test_batch_dependent_rotary_embeddings_are_refused_beyond_the_trained_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16)
    assert longest_exact_sequence(model.config) == 16
    assert longest_exact_sequence(tiny_config("llama")) is None
    patch(model)
    model(packed=PackedSequence.from_sequences(random_sequences((16, 16), 61)))
    with pytest.raises(ValueError, match="17 tokens is longer than the 16"):
        model(packed=PackedSequence.from_sequences(random_sequences((17,), 61)))
