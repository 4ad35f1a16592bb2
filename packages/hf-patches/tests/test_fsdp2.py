"""FSDP2 around a patched model: the head in the root and wrapped apart, before and after the patch, dp and sp."""

from itertools import product

import pytest
import torch
from comparing import assert_gradients_equal, gradients, scalar_loss
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_patches import patch
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

LENGTHS = (11, 1, 17, 6)


def shard(model, group, head_apart, policy=None):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if head_apart:
        fully_shard(model.lm_head, **options)
    fully_shard(model, **options)


def whole_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def train(group: ProcessGroup, head_apart, patch_first, sequence_parallel):
    model = tiny_model("gemma2", tie_word_embeddings=False)
    sp_group = group if sequence_parallel else None
    if patch_first:
        patch(model, sequence_parallel_group=sp_group)
    shard(model, group, head_apart)
    if not patch_first:
        patch(model, sequence_parallel_group=sp_group)
    seed = 0 if sequence_parallel else group.rank()
    output = model(packed=PackedSequence.from_sequences(random_sequences(LENGTHS, 61, seed)))
    # FSDP2 takes the mean of the gradients over all ranks, the sum over sp is wanted.
    (scalar_loss(output) * (group.size() if sequence_parallel else 1)).backward()
    return output.log_probs, whole_gradients(model)


# Each pair of two options; --slow has all.
CASES = [
    pytest.param(*case, marks=[] if sum(case) % 2 == 0 else pytest.mark.slow)
    for case in product((False, True), repeat=3)
]


@pytest.mark.parametrize(("head_apart", "patch_first", "sequence_parallel"), CASES)
def test_equal_to_one_rank(ranks, head_apart, patch_first, sequence_parallel):
    # Gemma 2 soft-caps its logits after the head: what it makes of the head's output there must not matter.
    model = tiny_model("gemma2", tie_word_embeddings=False)
    results = ranks.run(train, head_apart, patch_first, sequence_parallel, world=2, timeout=120)
    seeds = (0,) if sequence_parallel else (0, 1)
    for seed in seeds:
        scores = one_by_one(model, random_sequences(LENGTHS, 61, seed))
        (scalar_loss(scores) / len(seeds)).backward()
        torch.testing.assert_close(results[seed][0], scores.log_probs, atol=1e-5, rtol=0)
    assert_gradients_equal(results[0][1], gradients(model))


def heads_of_zeros(group: ProcessGroup, head_apart, patch_first, value_head):
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    patched = patch(model, value_head=value_head, sequence_parallel_group=group) if patch_first else None
    if patched is not None and value_head:
        torch.nn.init.zeros_(model.score.weight)
    shard(model, group, head_apart)
    if patched is None:
        patched = patch(model, sequence_parallel_group=group)
    probed = patched.probe()
    return probed.moved, probed.leak


@pytest.mark.parametrize(("head_apart", "patch_first", "value_head"), CASES)
def test_the_probe_of_heads_of_zeros(ranks, head_apart, patch_first, value_head):
    """Every head patched before and after FSDP2 took its weight, in the root and apart."""
    for moved, leak in ranks.run(heads_of_zeros, head_apart, patch_first, value_head, world=2, timeout=120):
        assert moved > 0
        assert leak == 0


def late_value_head(group: ProcessGroup):
    model = tiny_model("llama")
    shard(model, group, False)
    with pytest.raises(ValueError, match="patch it before fully_shard"):
        patch(model, value_head=True)
    return "score" in model._modules


def test_a_new_value_head_comes_before_sharding(ranks):
    assert ranks.run(late_value_head, world=2, timeout=120) == [False, False]


def mixed_precision(group: ProcessGroup):
    model = tiny_model("llama")
    patch(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, group, False, policy)
    patch_result = model.__dict__["_hf_patches_patch"].probe()
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 61))
    with pytest.raises(ValueError, match="cast_forward_inputs=True"):
        model(packed=packed, temperature=torch.ones(sum(LENGTHS)))
    output = model(packed=packed, temperature=[0.7] * 4)
    output.log_probs.sum().backward()
    return patch_result.leak, output.log_probs


def test_mixed_precision_casts_neither_the_plan_nor_the_results(ranks):
    expected = one_by_one(tiny_model("llama"), random_sequences(LENGTHS, 61), 0.7)
    for leak, log_probs in ranks.run(mixed_precision, world=2, timeout=120):
        assert leak == 0
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs, expected.log_probs, atol=0.3, rtol=0)
