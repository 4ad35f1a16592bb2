"""torch.autocast around a patched model with fp32 weights: errors like those that it makes of transformers' own."""

import pytest
import torch
from comparing import MIXTURES, TEXT, gradients, scalar_loss
from torch.distributed import ProcessGroup

from hf_patches import patch
from hf_patches.testing.tiny_models import (
    join_inputs,
    one_by_one,
    random_sample,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

LENGTHS = (120, 3, 90, 75)
# Every token goes to every expert: near a tie, the rounding alone would choose others.
ALL_EXPERTS = {"num_experts_per_tok": 4, "topk_group": 2}
# Both round alike, but for scores and logits, which transformers rounds once more: this much above its error is chance.
FACTOR = 1.15


def build(model_type):
    return tiny_model(model_type, **(ALL_EXPERTS if model_type in MIXTURES else {}))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def error(actual, expected):
    """The length of the difference in parts of the length of what is expected."""
    return ((actual - expected).norm() / expected.norm()).item()


def assert_no_worse(found, plain, exact):
    """(log-probs, gradients) under autocast, patched and not, by their errors against fp32."""
    assert error(found[0], exact[0]) <= FACTOR * error(plain[0], exact[0])
    names = [name for name, gradient in exact[1].items() if gradient.numel() > 1]  # the error of one number is chance
    ours, theirs = (torch.tensor([error(x[1][name], exact[1][name]) for name in names]) for x in (found, plain))
    assert ours.norm() <= FACTOR * theirs.norm(), list(zip(names, ours.tolist(), theirs.tolist(), strict=True))


def references(model_type):
    """transformers' own (log-probs, gradients), under autocast and in fp32."""
    results = []
    for enabled in (True, False):
        model = build(model_type)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores = one_by_one(model, random_sequences(LENGTHS, 61))
        scalar_loss(scores).backward()
        results.append((scores.log_probs.detach(), gradients(model)))
    return results


def patched(model_type, group=None, checkpointing=None, **options):
    model = build(model_type)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    patch(model, sequence_parallel_group=group, **options)
    with autocast():
        output = model(packed=PackedSequence.from_sequences(random_sequences(LENGTHS, 61)))
    assert output.log_probs.dtype == output.entropy.dtype == torch.float32
    scalar_loss(output).backward()
    return output.log_probs.detach(), gradients(model)


# Gates with SiLU and GELU, latents, experts, sinks, soft caps, norms that subtract the mean; --slow has all.
IN_EVERY_RUN = {"apertus", "cohere2", "deepseek_v3", "gemma2", "gpt_oss", "llama", "qwen3_moe"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in TEXT]
)
def test_no_worse_than_transformers(model_type):
    assert_no_worse(patched(model_type), *references(model_type))


def over_ranks(group: ProcessGroup, model_type):
    return patched(model_type, group)


@pytest.mark.parametrize("model_type", [pytest.param("gpt_oss", marks=pytest.mark.slow), "llama"])
def test_over_two_ranks(ranks, model_type):
    results = ranks.run(over_ranks, model_type, world=2, timeout=120)
    assert torch.equal(results[0][0], results[1][0])
    summed = {name: sum(found[name] for _, found in results) for name in results[0][1]}
    assert_no_worse((results[0][0], summed), *references(model_type))


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": False},
        {"checkpointing": True},
        {"tiled_mlp": 1},
        {"recompute": "full"},
        {"recompute": "selective"},
    ],
)
def test_recomputed_bit_for_bit(options):
    expected, found = patched("llama"), patched("llama", **options)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


def test_values_and_decoded_logits_stay_fp32():
    model = tiny_model("llama").eval()
    cache = patch(model, value_head=True).new_cache(1, 8)
    ids = torch.tensor([5, 6, 7])
    with torch.no_grad(), autocast():
        values = model(packed=PackedSequence.from_sequences([ids])).values
        logits = [model(packed=PackedSequence.from_sequences([part]), cache=cache).logits for part in ids.split([2, 1])]
    with torch.no_grad():
        exact = model(packed=PackedSequence.from_sequences([ids])).values
    for result in (values, *logits):
        assert result.dtype == torch.float32
        assert (result != result.bfloat16()).any()  # not rounded on the way
    torch.testing.assert_close(values, exact, atol=0.1, rtol=0)


def test_patched_and_probed_inside():
    model = tiny_model("qwen2_vl")
    samples = [random_sample(model, [3, (1, 4, 4), 5]), random_sample(model, [7])]
    packed = PackedSequence.from_sequences([sample.ids for sample in samples])
    exact = one_by_one(model, samples).log_probs
    with autocast():
        result = patch(model).probe_result
        found = model(packed=packed, **join_inputs(samples)).log_probs
    assert result.leak == 0
    assert result.key_values[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, exact, atol=0.2, rtol=0)
