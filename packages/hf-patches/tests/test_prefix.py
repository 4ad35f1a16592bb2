"""Prefix sharing: the prompt computed once, the results of whole sequences."""

import pytest
import torch
from comparing import assert_gradients_equal, gradients, scalar_loss
from torch.distributed import ProcessGroup

from hf_patches import patch, share_prefixes
from hf_patches.testing.tiny_models import (
    TokenScores,
    one_by_one,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

PROMPTS, RESPONSES = (7, 1, 9), ((5, 1, 8), (4,), (3, 0, 6, 2))


def case(prompts=PROMPTS, responses=RESPONSES):
    heads = random_sequences(prompts, 61, 0)
    tails = [random_sequences(lengths, 61, seed + 1) for seed, lengths in enumerate(responses)]
    return heads, tails


def unshared(model, heads, tails, temperature=1.0):
    """The response tokens' log-probs and entropies from whole sequences, each alone."""
    log_probs, entropies = [], []
    for head, group in zip(heads, tails, strict=True):
        for tail in group:
            scores = one_by_one(model, [torch.cat([head, tail])], temperature)
            window = slice(len(head) - 1, len(head) + len(tail) - 1)
            log_probs.append(scores.log_probs[window])
            entropies.append(scores.entropy[window])
    return TokenScores(torch.cat(log_probs), torch.cat(entropies))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt_oss", "deepseek_v3"])
def test_equal_to_whole_sequences(model_type):
    model = tiny_model(model_type)
    heads, tails = case()
    expected = unshared(model, heads, tails, 0.8)
    scalar_loss(expected).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    patch(model)
    shared = share_prefixes(heads, tails)
    assert shared.packed.num_tokens == sum(PROMPTS) + sum(map(sum, RESPONSES))
    output = model(packed=shared, temperature=0.8)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=3e-5, rtol=0)
    scalar_loss(output).backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    assert [len(x) for x in shared.split(output.log_probs)] == [5, 1, 8, 4, 3, 0, 6, 2]


def sharded(group: ProcessGroup):
    model = tiny_model("llama")
    patch(model, sequence_parallel_group=group)
    output = model(packed=share_prefixes(*case()), temperature=[0.5, 1.0, 2.0, 0.7, 0.9, 1.0, 1.1, 1.2])
    scalar_loss(output).backward()
    return output.log_probs, output.entropy, gradients(model)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_over_ranks(ranks, world):
    model = tiny_model("llama")
    patch(model)
    expected = model(packed=share_prefixes(*case()), temperature=[0.5, 1.0, 2.0, 0.7, 0.9, 1.0, 1.1, 1.2])
    scalar_loss(expected).backward()
    results = ranks.run(sharded, world=world, timeout=120)
    for log_probs, entropy, _ in results:
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected.entropy, atol=3e-5, rtol=0)
    summed = {name: sum(found[name] for *_, found in results) for name in gradients(model)}
    assert_gradients_equal(summed, gradients(model))


def test_values_stand_before_their_tokens():
    model = tiny_model("llama")
    patch(model, value_head=True)
    heads, tails = case((4,), ((3, 2),))
    shared = model(packed=share_prefixes(heads, tails))
    whole = model(packed=PackedSequence.from_sequences([torch.cat([heads[0], tail]) for tail in tails[0]]))
    expected = torch.cat([whole.values[3:6], whole.values[7 + 3 : 7 + 5]])
    torch.testing.assert_close(shared.values, expected, atol=1e-5, rtol=0)


def test_no_prompts_give_zero_gradients():
    model = tiny_model("llama")
    patch(model)
    output = model(packed=share_prefixes([], []))
    assert output.log_probs.shape == output.entropy.shape == (0,)
    output.log_probs.sum().backward()
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_refusals():
    heads, tails = case()
    model = tiny_model("llama")
    patch(model, fused_head=False)
    with pytest.raises(ValueError, match="shared prefixes need the fused head"):
        model(packed=share_prefixes(heads, tails))
