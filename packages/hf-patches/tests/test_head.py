"""The head: values, log-probs of padded batches, and no tensor of tokens x vocabulary."""

import numpy as np
import pytest
import torch
from comparing import assert_gradients_equal, gradients, scalar_loss
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hf_patches import patch
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    randomize,
    tiny_config,
    tiny_model,
)
from parallel_layers import PackedSequence, pack
from parallel_layers.head import SamplingMask

LENGTHS = (11, 1, 17, 6)


def value_model(model_type, num_labels=1):
    config = tiny_config(model_type, num_labels=num_labels)
    return randomize(AutoModelForTokenClassification.from_config(config, attn_implementation="eager"), 0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe"])
def test_values_of_a_token_classifier(model_type):
    model = value_model(model_type).eval()
    sequences = random_sequences(LENGTHS, 61)
    expected = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0, :, 0] for ids in sequences])
    weights = torch.randn(sum(LENGTHS))
    (weights * expected).sum().backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    patched = patch(model.train(), value_head=True)  # its dropout would move the values
    output = model(packed=PackedSequence.from_sequences(sequences))
    assert output.log_probs is None
    assert output.values.dtype == torch.float32
    torch.testing.assert_close(output.values, expected, atol=1e-5, rtol=0)
    (weights * output.values).sum().backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    patched.remove()
    assert model.dropout.p == 0.1


def test_a_causal_lm_gets_a_value_head_beside_its_own():
    model = tiny_model("llama")
    names = set(model.state_dict())
    sequences = random_sequences(LENGTHS, 61)
    expected = one_by_one(model, sequences)
    hidden = torch.cat([model.model(input_ids=ids[None]).last_hidden_state[0] for ids in sequences])
    patched = patch(model, value_head=True)
    assert set(model.state_dict()) - names == {"score.weight"}
    output = model(packed=PackedSequence.from_sequences(sequences))
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.values, (hidden @ model.score.weight.T)[:, 0], atol=1e-5, rtol=0)
    output.values.sum().backward()
    assert model.score.weight.grad.abs().max() > 0
    patched.remove()
    assert set(model.state_dict()) == names
    patch(model, value_head=True, fused_head=False)
    assert model(packed=PackedSequence.from_sequences(sequences)).log_probs is None


def test_values_are_fp32_for_bf16_weights():
    model = value_model("llama").bfloat16()
    patch(model, value_head=True)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 61))
    assert model(packed=packed).values.dtype == torch.float32


def test_values_of_several_labels():
    model = value_model("llama", num_labels=3).eval()
    sequences = random_sequences(LENGTHS, 61)
    expected = torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences])
    patch(model, value_head=True)
    torch.testing.assert_close(model(packed=PackedSequence.from_sequences(sequences)).values, expected)


def test_models_without_a_score_a_token_are_refused():
    config = tiny_config("llama", num_labels=1)
    with pytest.raises(ValueError, match="load it with AutoModelForTokenClassification"):
        patch(AutoModelForSequenceClassification.from_config(config), value_head=True)
    with pytest.raises(ValueError, match="fused_head=True needs an output embedding"):
        patch(value_model("llama"))


class Linear(torch.nn.Linear):
    """A LoRA layer: the class has torch's name and a forward of its own."""

    def forward(self, hidden):
        return super().forward(hidden) + 1


def test_a_lora_head_is_named_with_its_module():
    model = tiny_model("llama")
    model.lm_head = Linear(*reversed(model.lm_head.weight.shape), bias=False)
    message = rf"a plain torch.nn.Linear, got {__name__}.Linear; merge the adapter"
    with pytest.raises(ValueError, match=message):
        patch(model)
    model = tiny_model("llama")
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(ValueError, match=r"got torch.nn.modules.linear.Linear with another forward; merge"):
        patch(model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_keep_the_models_own_attention(side):
    model = tiny_model("gemma2")
    sequences = random_sequences((9, 1, 5), 61)
    expected = one_by_one(model, sequences, 0.7)
    scalar_loss(expected).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        where = slice(0, len(sequence)) if side == "right" else slice(9 - len(sequence), 9)
        ids[row, where], mask[row, where] = sequence, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    patched = patch(model, packed=False)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, temperature=0.7)
    assert output.log_probs.shape == (3, 9)
    kept = mask.bool()
    torch.testing.assert_close(output.log_probs[kept], expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy[kept], expected.entropy, atol=3e-5, rtol=0)
    assert output.log_probs[~kept].abs().max() == 0
    scalar_loss(type(output)(output.log_probs[kept], output.entropy[kept])).backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    assert "packed_attention" not in str(patched.report())
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    each_token = torch.tensor([0.5, 1.0, 2.0])[:, None].expand(3, 9)
    by_token = model(**batch, temperature=each_token).log_probs
    assert not torch.equal(by_token[kept], output.log_probs[kept])
    assert torch.equal(model(**batch, temperature=[0.5, 1.0, 2.0], return_dict=False).log_probs, by_token)
    assert torch.equal(model(**batch, temperature=np.float64(0.7)).log_probs, output.log_probs)
    with pytest.raises(ValueError, match="got 2 temperatures for 3 sequences"):
        model(**batch, temperature=[0.5, 1.0])
    with pytest.raises(ValueError, match="temperature=None is neither a number"):
        model(**batch, temperature=None)
    with pytest.raises(ValueError, match=r"temperature 0\.0 of a token must be positive"):
        model(**batch, temperature=mask.float())
    with pytest.raises(ValueError, match="temprature would change nothing in a call of this patched Gemma2"):
        model(**batch, temprature=0.7)
    with pytest.raises(ValueError, match=r"must have the shape \(3, 9\)"):
        model(input_ids=ids, labels=ids[:, 1:])
    for wrong in (mask[:2], torch.ones(3, 1, 9, 9)):
        with pytest.raises(ValueError, match=r"attention_mask has shape .*; give one entry per token, \(3, 9\)"):
            model(input_ids=ids, attention_mask=wrong)
    with pytest.raises(ValueError, match=r"leave (past_key_values|cache), logits_to_keep out, and before generate"):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0)
    assert pack(ids, mask).num_tokens == 15


def test_log_probs_within_given_tokens_of_padded_batches():
    """All tokens in the order of the vocabulary give the ordinary log-probs; two of them those of a pair."""
    model = tiny_model("llama")
    sequences = random_sequences((7, 7), 61)
    ids = torch.stack(sequences)
    patched = patch(model, packed=False)
    everything = SamplingMask.from_rows([range(61)] * 14)
    whole, same = model(input_ids=ids), model(input_ids=ids, sampling_mask=everything)
    torch.testing.assert_close(same.log_probs, whole.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(same.entropy, whole.entropy, atol=1e-5, rtol=0)
    pairs = SamplingMask.from_rows([[token, 60] for token in ids.roll(-1, 1).flatten().tolist()])
    other = model(input_ids=ids, labels=torch.full_like(ids, 60)).log_probs
    pair = model(input_ids=ids, sampling_mask=pairs).log_probs[:, :-1]
    expected = whole.log_probs - torch.logaddexp(whole.log_probs, other)
    own = (ids.roll(-1, 1) != 60)[:, :-1]
    torch.testing.assert_close(pair[own], expected[:, :-1][own], atol=1e-5, rtol=0)
    patched.remove()
    patch(model, fused_head=False)
    with pytest.raises(ValueError, match="needs the fused head"):
        model(packed=PackedSequence.from_sequences(sequences), sampling_mask=pairs)


def test_the_head_never_holds_tokens_times_vocabulary():
    tokens, vocabulary = 2048, 8192
    model = tiny_model("llama", vocab_size=vocabulary, num_hidden_layers=1)
    patch(model)
    packed = PackedSequence.from_sequences(random_sequences((8,) * (tokens // 8), vocabulary))
    # All memory that is asked for: a dispatch mode would see nothing inside the head's operator.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = model(packed=packed)
        (output.log_probs.sum() + output.entropy.sum()).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    largest = max(event.nbytes() for event in events)
    assert model.lm_head.weight.nbytes <= largest <= 4 * tokens * vocabulary // 4
