"""Plans of which heads are exchanged: arithmetic alone."""

import pytest
import torch
from hypothesis import given, strategies as st

from parallel_layers.attention.context_parallel.ulysses import plan_heads


@given(kv_heads=st.integers(1, 16), group=st.integers(1, 16), size=st.integers(1, 8))
def test_every_rank_gets_whole_groups_and_every_head_its_own_keys(kv_heads: int, group: int, size: int) -> None:
    plan = plan_heads(kv_heads * group, kv_heads, size)
    assert all(heads % size == 0 for heads in plan.heads_sent)
    queries = torch.arange(1, kv_heads * group + 1).view(1, -1, 1)
    keys = torch.arange(1, kv_heads + 1).view(1, -1, 1)
    sent, sent_keys = plan.spread_queries(queries), plan.spread_keys(keys)
    assert torch.equal(plan.gather_queries(sent), queries)
    read = sent_keys.repeat_interleave(plan.group_size, dim=1)  # the key head that each query head reads
    assert torch.equal(plan.gather_queries(read), keys.repeat_interleave(group, dim=1))


@pytest.mark.parametrize(
    ("heads", "size", "sent"),
    [
        ((8, 4), 4, (8, 4)),  # as they are
        ((8, 2), 4, (8, 4)),  # repeated
        ((12, 3), 2, (12, 6)),  # repeated: groups of 4 become groups of 2
        ((14, 2), 4, (16, 4)),  # groups of 7 padded to 8
        ((28, 4), 8, (32, 8)),
        ((10, 5), 4, (12, 12)),  # dissolved
        ((3, 3), 2, (4, 4)),
        ((4, 1), 3, (6, 3)),
    ],
)
def test_as_few_heads_as_possible_are_sent(heads: tuple[int, int], size: int, sent: tuple[int, int]) -> None:
    plan = plan_heads(*heads, size)
    assert plan.heads_sent == sent
