"""ParallelLatentAttention: decoding with a cache of latents equals attention to expanded keys and values.

That attention is compared with transformers' in decoder/test_parity.py, at every grid.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention import AttentionConfig, LatentConfig, ParallelLatentAttention, latent
from parallel_layers.attention.layer import ParallelAttention
from parallel_layers.attention.packed import packed_attention
from parallel_layers.inference import PagedKVCache, cache as paged
from parallel_layers.linear.execution import Placement
from parallel_layers.module.initialization import initialize_
from parallel_layers.rotary.embedding import RotaryEmbedding
from parallel_layers.testing import RankPool

HIDDEN, HEADS = 24, 4
SIZES = LatentConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=14)
CONFIG = AttentionConfig(hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=HEADS, latent=SIZES, rotary_interleaved=True)
# Tokens that each of the three sequences brings, forward by forward.
STEPS = [[5, 1, 0], [1, 1, 4], [1, 0, 1], [0, 3, 1], [1, 1, 1]]


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@torch.no_grad()
def decode(
    group: ProcessGroup | None, sequences: list[Tensor], window: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Each sequence's outputs: in one forward without a cache, and step by step with one."""
    layer = ParallelLatentAttention(replace(CONFIG, window=window), placement=Placement(group))
    initialize_(layer, 0)
    rotary = RotaryEmbedding(SIZES.qk_rope_head_dim)
    lengths = [len(x) for x in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    whole = layer(torch.cat(sequences), rotary(positions), cu_seqlens_of(lengths), max(lengths))
    cache = PagedKVCache([layer.cache_shape], len(sequences), max(lengths), block_size=4)
    outs: list[list[Tensor]] = [[] for _ in sequences]
    for new in STEPS:
        starts = cache.lengths.tolist()
        parts = [x[start : start + n] for x, start, n in zip(sequences, starts, new, strict=True)]
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, new, strict=True)])
        cu_seqlens = cu_seqlens_of(new)
        hidden = layer(torch.cat(parts), rotary(positions), cu_seqlens, max(new), cache=cache.layer(0))
        cache.advance(cu_seqlens)
        for out, part in zip(outs, hidden.split(new), strict=True):
            out.append(part)
    return list(whole.split(lengths)), [torch.cat(out) for out in outs]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_decoding_equals_the_full_forward(ranks: RankPool, tp: int, window: int | None) -> None:
    torch.manual_seed(0)
    sequences = [torch.randn(sum(step[i] for step in STEPS), HIDDEN) for i in range(3)]
    arguments = (sequences, window)
    results = [decode(None, *arguments)] if tp == 1 else ranks.run(decode, *arguments, world=tp)
    for whole, stepwise in results:
        for ours, expected in zip(stepwise, whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_cache_keeps_one_latent_a_token() -> None:
    """And nothing beside it for the values, also for a second sample of a prompt."""
    layer = ParallelLatentAttention(CONFIG)
    assert layer.cache_shape == (1, SIZES.kv_lora_rank + SIZES.qk_rope_head_dim, SIZES.kv_lora_rank, True)
    cache = PagedKVCache([layer.cache_shape], 2, 6, block_size=4)
    assert cache.values == {0: None}
    rotary, x = RotaryEmbedding(SIZES.qk_rope_head_dim), torch.randn(6, HIDDEN)
    with torch.no_grad():
        expected = layer(x, rotary(torch.arange(6)), cu_seqlens_of([6]), 6)
        layer(x[:5], rotary(torch.arange(5)), cu_seqlens_of([0, 5]), 5, cache=cache.layer(0))
        cache.advance(cu_seqlens_of([0, 5]))
        cache.share(1, [0], 5)
        ends = layer(x[[5, 5]], rotary(torch.tensor([5, 5])), cu_seqlens_of([1, 1]), 1, cache=cache.layer(0))
    torch.testing.assert_close(ends, expected[[5, 5]], rtol=1e-5, atol=1e-5)


def test_only_a_cache_with_tokens_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward attends with expanded keys, in heads of a size that the fast kernels take."""
    sizes = []

    def spy(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
        sizes.append(q.shape[-1])
        return packed_attention(q, *arguments, **options)

    for module in (latent, paged):
        monkeypatch.setattr(module, "packed_attention", spy)
    layer = ParallelLatentAttention(CONFIG)
    cache = PagedKVCache([layer.cache_shape], 2, 9, block_size=4)
    rotary = RotaryEmbedding(SIZES.qk_rope_head_dim)

    @torch.no_grad()
    def bring(lengths: list[int]) -> None:
        tokens = sum(lengths)
        bounds = cu_seqlens_of(lengths)
        layer(torch.randn(tokens, HIDDEN), rotary(torch.arange(tokens)), bounds, max(lengths), cache=cache.layer(0))
        cache.advance(bounds)

    bring([4, 0])
    bring([1, 3])
    cache.free([0])
    bring([3, 1])
    cache.free([0, 1])
    bring([1, 1])
    expanded, latents = SIZES.qk_head_dim, layer.cache_shape.head_dim
    assert sizes == [expanded, latents, latents, expanded]
    with pytest.raises(ValueError, match="a cache is for inference"):
        layer(torch.randn(2, HIDDEN), rotary(torch.arange(2)), cu_seqlens_of([1, 1]), 1, cache=cache.layer(0))


def test_a_config_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="the config describes multi-head latent attention; use ParallelLatent"):
        ParallelAttention(CONFIG)
    with pytest.raises(ValueError, match=r"latent=None; give the sizes as AttentionConfig\(latent=LatentConfig"):
        ParallelLatentAttention(replace(CONFIG, latent=None, head_dim=6))


def test_initial_weights_are_the_same_at_every_group_size(ranks: RankPool) -> None:
    whole = initial_weights(None)
    for rank, local in enumerate(ranks.run(initial_weights, world=2)):
        for name, tensor in local.items():
            dim = 1 if name == "o_proj.weight" else 0
            divided = tensor.shape != whole[name].shape
            assert divided == (name in ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"))
            assert torch.equal(tensor, whole[name].chunk(2, dim)[rank] if divided else whole[name])


def initial_weights(group: ProcessGroup | None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return dict(ParallelLatentAttention(CONFIG, placement=Placement(group)).state_dict())


def test_heads_that_do_not_divide(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads=3 is not divisible by tp=2; use tp in \{1, 3\}"):
        ranks.run(indivisible, world=2)


def indivisible(group: ProcessGroup) -> None:
    ParallelLatentAttention(replace(CONFIG, num_heads=3, num_kv_heads=3), placement=Placement(group))
