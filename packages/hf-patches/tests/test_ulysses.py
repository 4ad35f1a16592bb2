"""Head plans as arithmetic, and the exchange of heads for tokens on gloo ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_patches.ulysses import plan_heads, ulysses_attention
from parallel_layers.attention import packed_attention

LAYOUTS = [(14, 2), (12, 3), (10, 5), (4, 1), (3, 3)]


@given(kv=st.integers(1, 16), group=st.integers(1, 16), world=st.integers(1, 8))
def test_every_rank_gets_whole_groups(kv, group, world):
    plan = plan_heads(kv * group, kv, world)
    keys, queries = plan.num_kv_heads(kv), plan.num_query_heads(kv)
    assert keys % world == queries % world == 0
    assert queries >= kv * group
    assert plan.repeats * plan.group_size >= group


@pytest.mark.parametrize(
    ("heads", "world", "sent"),
    [
        ((8, 4), 4, (8, 4)),  # as they are
        ((8, 2), 4, (8, 4)),  # repeated
        ((12, 3), 2, (12, 6)),  # repeated, groups of 4 become groups of 2
        ((14, 2), 4, (16, 4)),  # groups of 7 padded to 8
        ((10, 5), 4, (12, 12)),  # dissolved
        ((3, 3), 2, (4, 4)),
        ((4, 1), 3, (6, 3)),
    ],
)
def test_as_few_heads_as_possible_are_sent(heads, world, sent):
    plan = plan_heads(*heads, world)
    assert (plan.num_query_heads(heads[1]), plan.num_kv_heads(heads[1])) == sent


def attention_case(queries, keys, tokens, value_size):
    generator = torch.Generator().manual_seed(queries)
    shapes = {"q": (tokens, queries, 8), "k": (tokens, keys, 8), "v": (tokens, keys, value_size), "sinks": (queries,)}
    case = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    return case, torch.randn(tokens, queries, value_size, generator=generator, dtype=torch.float64)


def attend(cu_seqlens):
    def run(q, k, v, sinks):
        return packed_attention(q, k, v, cu_seqlens, 12, window=6, sinks=sinks)

    return run


def exchange(group, queries, keys, tokens, value_size, cu_seqlens):
    case, upstream = attention_case(queries, keys, tokens, value_size)
    mine = slice(group.rank() * tokens // group.size(), (group.rank() + 1) * tokens // group.size())
    output = ulysses_attention(
        attend(cu_seqlens), case["q"][mine], case["k"][mine], case["v"][mine], case["sinks"], group
    )
    output.backward(upstream[mine])
    return output, {name: x.grad for name, x in case.items()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equal_to_attention_on_one_rank(ranks, world):
    for heads in LAYOUTS:
        check_layout(ranks, heads, world)


def check_layout(ranks, heads, world):
    tokens, value_size, cu_seqlens = 24, 5, torch.tensor([0, 7, 7, 8, 20, 24], dtype=torch.int32)
    case, upstream = attention_case(*heads, tokens, value_size)
    expected = attend(cu_seqlens)(**case)
    expected.backward(upstream)
    results = ranks.run(exchange, *heads, tokens, value_size, cu_seqlens, world=world, timeout=60)
    torch.testing.assert_close(torch.cat([output for output, _ in results]), expected, atol=1e-12, rtol=0)
    for name, x in case.items():
        total = sum(gradients[name] for _, gradients in results)
        torch.testing.assert_close(total, x.grad, atol=1e-12, rtol=1e-12)
