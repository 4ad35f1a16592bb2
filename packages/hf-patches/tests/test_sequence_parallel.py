"""Whole models over sp ranks: every rank gets the whole batch's numbers, and gradients add up to transformers' own."""

import pytest
import torch
from comparing import assert_gradients_equal, gradients, recurrent, scalar_loss
from torch.distributed import ProcessGroup

from hf_patches import patch
from hf_patches.batch import plan_batch
from hf_patches.isolation import measure_leak
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

DENSE = "qwen3_5_text"
LENGTHS = (11, 1, 17, 6)
LAYOUTS = [(14, 2), (12, 3), (10, 5), (4, 1), (3, 3)]


def reference(model_type, overrides, lengths=LENGTHS):
    model = tiny_model(model_type, **overrides)
    scores = one_by_one(model, random_sequences(lengths, model.config.vocab_size))
    scalar_loss(scores).backward()
    return scores, gradients(model)


def sharded(group: ProcessGroup, model_type, overrides, checkpointing=False, lengths=LENGTHS):
    model = tiny_model(model_type, **overrides)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patch(model, sequence_parallel_group=group)
    packed = PackedSequence.from_sequences(random_sequences(lengths, model.config.vocab_size))
    output = model(packed=packed)
    scalar_loss(output).backward()
    return output.log_probs, output.entropy, gradients(model)


def check(ranks, world, model_type, overrides, tolerance=1e-5, **options):
    expected, expected_gradients = reference(model_type, overrides, options.get("lengths", LENGTHS))
    results = ranks.run(sharded, model_type, overrides, world=world, timeout=120, **options)
    for log_probs, entropy, _ in results:
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected.entropy, atol=3e-5, rtol=0)
        assert torch.equal(log_probs, results[0][0])
    summed = {name: sum(found[name] for *_, found in results) for name in expected_gradients}
    assert_gradients_equal(summed, expected_gradients, tolerance)


@pytest.mark.parametrize(
    ("model_type", "world"),
    [
        ("llama", 2),
        ("qwen2", 4),
        pytest.param("llama", 4, marks=pytest.mark.slow),
        pytest.param("qwen2", 2, marks=pytest.mark.slow),
    ],
)
def test_equal_to_transformers(ranks, model_type, world):
    check(ranks, world, model_type, {})


@pytest.mark.parametrize("model_type", recurrent(DENSE, "kimi_linear", "nemotron_h"))
@pytest.mark.parametrize(
    ("lengths", "world"),
    [
        pytest.param((11, 1, 17, 6), 3, marks=pytest.mark.slow),
        ((5, 1, 2), 4),  # two tokens a rank, fewer than the convolution's window
        pytest.param((40, 1, 3), 2, marks=pytest.mark.slow),
    ],
)
def test_recurrent_layers(ranks, model_type, lengths, world):
    # The norm behind a recurrence divides by outputs that may be near zero.
    check(ranks, world, model_type, {}, tolerance=3e-5, lengths=lengths)


def test_under_gradient_checkpointing(ranks):
    check(ranks, 2, "llama", {}, checkpointing=True)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_sinks_follow_their_heads(ranks, world):
    check(ranks, world, "gpt_oss", {})


@pytest.mark.parametrize(
    ("heads", "world"),
    [
        pytest.param(heads, world, marks=() if (heads, world) in {((14, 2), 4), ((10, 5), 3)} else pytest.mark.slow)
        for heads in LAYOUTS
        for world in (2, 3, 4)
    ],
)
def test_head_layouts(ranks, heads, world):
    queries, keys = heads
    sizes = {"hidden_size": queries * 4, "num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 4}
    check(ranks, world, "llama", sizes)


@pytest.mark.parametrize("lengths", [(1,), pytest.param((3,), marks=pytest.mark.slow), (5, 1, 1)])
def test_lengths_that_do_not_divide(ranks, lengths):
    check(ranks, 4, "llama", {}, lengths=lengths)


def chosen(group: ProcessGroup | None):
    """Labels and temperatures of the caller, one for each token and one for each sequence."""
    model = tiny_model("llama")
    patch(model, sequence_parallel_group=group)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 61))
    labels = torch.randint(61, (35,), generator=torch.Generator().manual_seed(1)).index_fill(
        0, torch.tensor([17]), -100
    )
    each_token = torch.linspace(0.5, 2, 35)
    first = model(packed=packed, labels=labels, temperature=each_token)
    second = model(packed=packed, temperature=[0.5, 1.0, 2.0, 0.7])
    return torch.stack([first.log_probs, first.entropy, second.log_probs, second.entropy])


def test_labels_and_temperatures_are_cut_after_they_are_made(ranks):
    expected = chosen(None)
    assert expected[0, 17] == 0
    for found in ranks.run(chosen, world=4, timeout=60):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def bad_label(group: ProcessGroup):
    model = tiny_model("llama")
    patch(model, sequence_parallel_group=group)
    packed = PackedSequence.from_sequences(random_sequences((8,), 61))
    labels = torch.zeros(8, dtype=torch.int64)
    labels[0] = 61
    with pytest.raises(ValueError, match="label 61 is outside the vocabulary of 61"):
        model(packed=packed, labels=labels)
    return True


def test_a_bad_label_raises_on_every_rank_alike(ranks):
    assert ranks.run(bad_label, world=2, timeout=30) == [True, True]


def keep_groups_apart(group: ProcessGroup):
    """Two models in one process: one over the group, one alone."""
    model, alone = tiny_model("llama"), tiny_model("llama")
    patch(model, sequence_parallel_group=group)
    patch(alone)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 61))
    return model(packed=packed).log_probs, alone(packed=packed).log_probs


def test_two_settings_live_in_one_process(ranks):
    for together, alone in ranks.run(keep_groups_apart, world=2, timeout=60):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def leak_on_rank_0(group: ProcessGroup):
    plan = plan_batch(PackedSequence.from_sequences(random_sequences((2, 3, 4), 61)), group, "auto")
    x = torch.ones(plan.num_tokens // 2, 2)
    return measure_leak((lambda x: x.cumsum(0)) if group.rank() == 0 else torch.neg, [x], plan, gradients=False)


def test_a_leak_on_one_rank_is_known_on_every_rank(ranks):
    leaks = ranks.run(leak_on_rank_0, world=2, timeout=60)
    assert leaks[0] == leaks[1] > 0
