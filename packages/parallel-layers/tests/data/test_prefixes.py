"""Prefix sharing: the key side of any shape, and attention as over whole sequences."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from parallel_layers import PackedSequence, ParallelAttention, RotaryEmbedding
from parallel_layers.attention.config import AttentionConfig
from parallel_layers.attention.shared_keys import repeated_rows
from parallel_layers.data.micro_batches import pad_to
from parallel_layers.data.prefixes import share_prefixes

Group = tuple[int, list[int]]


def pieces(groups: list[Group]) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(61, (length,), generator=generator)

    return [draw(length) for length, _ in groups], [[draw(n) for n in lengths] for _, lengths in groups]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_the_key_side_of_any_shape(groups: list[Group], more: int, again: int) -> None:
    heads, tails = pieces(groups)
    shared = share_prefixes(heads, tails)
    packed = shared.packed
    for number in (more, again):
        packed = pad_to(packed, packed.num_tokens + number)
    assert packed.shared_keys is not None
    ids, bounds = packed.input_ids, packed.shared_keys.cu_seqlens.tolist()
    seen = [ids[packed.shared_keys.index[a:b]] for a, b in pairwise(bounds)]
    whole = [
        x for head, group in zip(heads, tails, strict=True) for x in (head, *(torch.cat([head, t]) for t in group))
    ]
    if packed.padding:
        assert packed.padding == more + again
        whole.append(ids[-packed.padding :])
    assert len(seen) == len(whole) == len(packed.cu_seqlens) - 1
    assert all(torch.equal(a, b) for a, b in zip(seen, whole, strict=True))
    assert packed.longest == max(map(len, whole))
    assert len(shared.rows) == len(shared.labels) == sum(shared.lengths)
    previous = [
        x for group, head in zip(tails, heads, strict=True) for t in group for x in torch.cat([head[-1:], t])[:-1]
    ]
    assert ids[shared.rows].tolist() == [int(x) for x in previous]


@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_gives_what_whole_sequences_give(window: int | None) -> None:
    torch.manual_seed(0)
    heads, tails = pieces([(4, [3, 1, 5]), (1, [2])])
    shared = share_prefixes(heads, tails).packed
    whole = PackedSequence.from_sequences(
        [torch.cat([head, tail]) for head, group in zip(heads, tails, strict=True) for tail in group]
    )
    config = AttentionConfig(hidden_size=16, num_heads=4, num_kv_heads=2, window=window, attention_sinks=True)
    layer, rotary = ParallelAttention(config, dtype=torch.float64), RotaryEmbedding(4)
    table = torch.randn(61, 16, dtype=torch.float64, requires_grad=True)

    def run(packed: PackedSequence) -> list[torch.Tensor]:
        return list(
            layer(
                table[packed.input_ids], rotary.tables(packed.position_ids), packed.cu_seqlens, packed.max_seqlen,
                shared_keys=packed.shared_keys,
            ).split(packed.lengths)
        )  # fmt: skip

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, [table, *layer.parameters()]))

    a, a1, a2, a3, b, b1 = run(shared)
    ours = [torch.cat(pair) for pair in ((a, a1), (a, a2), (a, a3), (b, b1))]
    theirs = run(whole)
    for mine, theirs_ in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_, rtol=0, atol=1e-12)
    sums = [sum(x.square().sum() for x in outputs) for outputs in (ours, theirs)]
    for mine, expected in zip(*map(gradients, sums), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    layer.attend = lambda *_: None
    with pytest.raises(ValueError, match="shared keys do not go with a context-parallel group"):
        run(shared)


def test_gradients_of_repeated_rows_are_rounded_once() -> None:
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    repeated_rows(x, torch.zeros(400, dtype=torch.int64)).sum().backward()
    assert x.grad is not None
    assert x.grad[0] == 400  # bf16 sums of ones stop at 256


def test_refusals() -> None:
    heads, tails = pieces([(3, [2]), (2, [1]), (4, [1])])
    with pytest.raises(ValueError, match="a prompt is empty"):
        share_prefixes([heads[0][:0]], [tails[0]])
    with pytest.raises(ValueError, match="3 prompts but responses to 2"):
        share_prefixes(heads, tails[:2])
