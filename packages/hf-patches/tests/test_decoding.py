"""Generation with a cache of keys and values: the logits of the whole sequences, token by token."""

import pytest
import torch
from comparing import STATELESS
from torch.distributed import ProcessGroup

from hf_patches import patch, share_prefixes
from hf_patches.testing.tiny_models import random_sequences, tiny_model
from parallel_layers import PackedSequence
from parallel_layers.attention import CacheShape
from parallel_layers.inference import PagedKVCache

PROMPTS = (7, 1, 11)
STEPS = 4


@torch.no_grad()
def whole(model, sequences):
    """The logits of an unpatched model after each sequence's last token."""
    return torch.stack([model(input_ids=ids[None], use_cache=False).logits[0, -1] for ids in sequences])


@torch.no_grad()
def check_decoding(model_type, **options):
    model = tiny_model(model_type).eval()
    vocab_size = model.config.get_text_config().vocab_size
    rows = random_sequences([length + STEPS for length in PROMPTS], vocab_size)
    known = [rows[i][:length] for i, length in enumerate(PROMPTS)]
    states = []
    for step in range(STEPS):
        states.append((list(known), whole(model, known)))
        # The second sequence pauses for a step: it has no new token.
        known = [
            row[: len(have) + (step != 1 or i != 1)] for i, (row, have) in enumerate(zip(rows, known, strict=True))
        ]
    patched = patch(model, **options)
    cache = patched.new_cache(len(PROMPTS), max(len(row) for row in rows))
    before = [0] * len(PROMPTS)
    for sequences, expected in states:
        new = [ids[count:] for ids, count in zip(sequences, before, strict=True)]
        logits = model(packed=PackedSequence.from_sequences(new), cache=cache).logits
        assert logits.shape == (len(PROMPTS), vocab_size)
        moved = [len(ids) > 0 for ids in new]
        torch.testing.assert_close(logits[moved], expected[moved], atol=1e-5, rtol=0)
        before = [len(ids) for ids in sequences]
    assert cache.lengths.tolist() == before


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", STATELESS)
def test_decoding_equals_the_full_forward(model_type):
    check_decoding(model_type)


def test_without_the_fused_head():
    check_decoding("gemma2", fused_head=False)


@torch.no_grad()
def test_a_paged_cache_and_a_batch_with_padding():
    model = tiny_model("llama")
    sequences = random_sequences(PROMPTS, 61)
    expected = whole(model, sequences)
    kinds = patch(model).probe_result.key_values
    cache = PagedKVCache(
        [CacheShape(kind.heads, kind.key_dim, kind.key_dim) for kind in kinds],
        len(PROMPTS),
        16,
        num_blocks=8,
        block_size=4,
    )
    packed = PackedSequence.from_sequences(sequences, multiple_of=8)
    torch.testing.assert_close(model(packed=packed, cache=cache).logits, expected, atol=1e-5, rtol=0)


def decode_apart(group: ProcessGroup):
    """Each rank decodes sequences of its own, another number on each, though the patch has a group."""
    model = tiny_model("llama")
    patched = patch(model, sequence_parallel_group=group)
    sequences = random_sequences(PROMPTS, 61)[group.rank() :]
    with torch.no_grad():
        cache = patched.new_cache(len(sequences), 16)
        return model(packed=PackedSequence.from_sequences(sequences), cache=cache).logits


def test_ranks_of_a_sequence_parallel_group_decode_apart(ranks):
    expected = whole(tiny_model("llama"), random_sequences(PROMPTS, 61))
    for rank, logits in enumerate(ranks.run(decode_apart, world=2, timeout=60)):
        torch.testing.assert_close(logits, expected[rank:], atol=1e-5, rtol=0)


def test_what_a_cache_cannot_mean_is_refused():
    model = tiny_model("llama")
    patched = patch(model)
    sequences = random_sequences((5, 3), 61)
    packed = PackedSequence.from_sequences(sequences)
    cache = patched.new_cache(2, 6)
    with pytest.raises(ValueError, match="leave labels, entropy out"):
        model(packed=packed, cache=cache, labels=packed.input_ids, entropy=True)
    with pytest.raises(ValueError, match="2 sequences for a cache of 3"):
        model(packed=packed, cache=patched.new_cache(3, 6))
    with pytest.raises(ValueError, match="got SharedPrefixes and PagedKVCache"):
        model(packed=share_prefixes(sequences[:1], [sequences]), cache=cache)
    with pytest.raises(ValueError, match=r"run the model under torch\.no_grad"):
        model(packed=packed, cache=cache)
    with torch.no_grad():
        model(packed=packed, cache=cache)
        with pytest.raises(ValueError, match=r"would have 10 tokens.*max_length=6"):
            model(packed=packed, cache=cache)
    model(packed=packed)  # the model itself is as usable as before
    patched.remove()
    with pytest.raises(ValueError, match="needs a proven packed patch"):
        patch(model, packed=False).new_cache(2, 6)


def test_a_rotary_embedding_that_changes_with_the_length_bounds_the_cache():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16)
    cache = patch(model).new_cache(1, 17)
    with pytest.raises(ValueError, match="max_length=17 is longer than the 16 tokens of training"):
        model(packed=PackedSequence.from_sequences(random_sequences((3,), 61)), cache=cache)
