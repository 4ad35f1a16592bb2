"""Layers go to pipeline stages by cost: no split has a faster slowest stage, and every stage has a layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ckpt import Grid, layout_for
from ckpt.layout.place import Cost, split_by_cost

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# ERNIE-4.5-21B-A3B.
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 103424,
}
costs = st.builds(Cost, st.integers(0, 9), st.integers(1, 9))


@given(st.lists(costs, min_size=1, max_size=7), costs, costs, st.data())
def test_no_split_is_better(layers: list[Cost], first: Cost, last: Cost, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, len(layers)))

    def worst(counts: list[int]) -> tuple[int, ...]:
        ends = list(itertools.accumulate(counts))
        parts = [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]
        parts[0], parts[-1] = [*parts[0], first], [*parts[-1], last]
        return tuple(max(sum(cost[kind] for cost in part) for part in parts) for kind in range(2))

    counts = split_by_cost(layers, first, last, chunks)
    assert (len(counts), sum(counts), min(counts) > 0) == (chunks, len(layers), True)
    cuts = itertools.combinations(range(1, len(layers)), chunks - 1)
    edges = [(0, *cut, len(layers)) for cut in cuts]
    best = min(worst([b - a for a, b in itertools.pairwise(edge)]) for edge in edges)
    if chunks > 1:
        assert worst(counts) == best


@pytest.mark.parametrize(
    ("config", "role", "pp", "expected"),
    [
        # The head costs as much as 2.4 layers, the embedding is held beside the first.
        (LLAMA_8B, "causal_lm", 2, [17, 15]),
        (LLAMA_8B, "causal_lm", 4, [8, 9, 9, 6]),
        ({**LLAMA_8B, "tie_word_embeddings": True}, "causal_lm", 4, [8, 9, 9, 6]),
        (LLAMA_8B, "value", 4, [8, 8, 8, 8]),
        ({**LLAMA_8B, "num_hidden_layers": 3}, "value", 2, [1, 2]),
        # A layer of experts computes with 9 of 257, as much as a dense layer.
        (DEEPSEEK, "causal_lm", 8, [7, 8, 8, 8, 8, 8, 8, 6]),
        # With 3 of 257 a dense layer costs 1.8 others.
        ({**DEEPSEEK, "num_experts_per_tok": 2}, "causal_lm", 4, [13, 17, 17, 14]),
        # The head costs as much as 2.4 layers with 6 of 64 experts.
        (ERNIE, "causal_lm", 2, [15, 13]),
    ],
)
def test_head_and_embedding_count(config: dict[str, Any], role: Any, pp: int, expected: list[int]) -> None:
    layout = layout_for(config, role=role)
    chunks = layout.chunk_layers(Grid(pp=pp))
    assert [len(layers) for layers in chunks] == expected
    assert list(itertools.chain(*chunks)) == list(range(layout.num_layers))


def test_stacked_experts_count_by_the_tokens_that_they_get() -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = {"architectures": ["GptOssForCausalLM"], **sizes, "num_local_experts": 32, "num_experts_per_tok": 4}
    layers, _, head = layout_for({**config, "num_key_value_heads": 4, "vocab_size": 1600})._costs
    assert layers[0].held > 6 * layers[0].computed > head.computed > layers[0].computed
    chunks = layout_for({**config, "num_key_value_heads": 4, "vocab_size": 1600}).chunk_layers(Grid(pp=2))
    assert [len(layers) for layers in chunks] == [5, 3]


def test_fewer_layers_than_stages_are_refused() -> None:
    layout = layout_for(LLAMA_8B)
    assert layout.chunk_layers(Grid(pp=32)) == tuple((layer,) for layer in range(32))
    with pytest.raises(ValueError, match=r"num_hidden_layers=32 is fewer than the 66 chunks .*: use at most 32 chunks"):
        layout.chunk_layers(Grid(pp=33, vpp=2))
