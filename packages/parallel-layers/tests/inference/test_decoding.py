"""Decoding with a cache, step by step, equals one forward over everything."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.decoder import DecoderConfig, DecoderLayer
from parallel_layers.inference import KVCache, PagedKVCache
from parallel_layers.rotary import RotaryEmbedding
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32)
LAYERS = 2
# Tokens that each of the three sequences brings, forward by forward: prompts, single tokens, nothing, a chunk.
STEPS = [[5, 1, 0], [1, 1, 4], [1, 0, 1], [0, 3, 1], [1, 1, 1], [1, 1, 1]]
Steps = Sequence[Sequence[int]]
ROOM = 12
CACHES = {
    "contiguous": KVCache,
    "paged": partial(PagedKVCache, block_size=4),
    # Less than three sequences' room, and gathered a sequence at a time.
    "small-pool": partial(PagedKVCache, block_size=2, num_blocks=14, max_gathered=1),
}


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def build(config: DecoderConfig, group: ProcessGroup | None, sequence_parallel: bool) -> nn.ModuleList:
    """The same layers at every tp: drawn whole, each rank keeps its part."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    generator = torch.Generator().manual_seed(0)
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        whole = DecoderLayer(config).state_dict()
        for tensor in whole.values():
            tensor.normal_(std=0.3, generator=generator)
        local = dict(whole)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        qkv = whole["self_attn.qkv_proj.weight"].split([count * config.head_dim for count in heads])
        local["self_attn.qkv_proj.weight"] = torch.cat([part.chunk(size)[rank] for part in qkv])
        gate_up = whole["mlp.gate_up_proj.weight"].chunk(2)
        local["mlp.gate_up_proj.weight"] = torch.cat([part.chunk(size)[rank] for part in gate_up])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            local[name] = whole[name].chunk(size, dim=1)[rank]
        layer = DecoderLayer(config, group=group, sequence_parallel=sequence_parallel)
        layer.load_state_dict(local)
        layers.append(layer)
    return layers


@torch.no_grad()
def decode(
    group: ProcessGroup | None, cached: str, config: DecoderConfig, sequences: list[Tensor], steps: Steps, sp: bool
) -> list[Tensor]:
    """Each sequence's outputs, made in the given steps; with sequence parallelism each forward is padded to divide."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    layers, rotary = build(config, group, sp), RotaryEmbedding(config.head_dim)
    kv_heads = layers[0].self_attn.num_kv_heads_local
    cache = CACHES[cached](LAYERS, len(sequences), ROOM, kv_heads, config.head_dim)
    outs: list[list[Tensor]] = [[] for _ in sequences]
    for new in steps:
        starts = cache.lengths.tolist()
        parts = [x[start : start + n] for x, start, n in zip(sequences, starts, new, strict=True)]
        positions = [torch.arange(start, start + n) for start, n in zip(starts, new, strict=True)]
        lengths = list(new)
        if sp:
            padding = -sum(new) % size or size
            parts.append(torch.full((padding, config.hidden_size), 9.0))
            positions.append(torch.arange(padding))
            lengths.append(padding)
        hidden, cu_seqlens = torch.cat(parts), cu_seqlens_of(lengths)
        hidden = hidden.chunk(size)[rank] if sp else hidden
        for i, layer in enumerate(layers):
            hidden = layer(hidden, rotary(torch.cat(positions)), cu_seqlens, max(lengths), cache=cache.layer(i))
        cache.advance(cu_seqlens)
        if sp:
            pieces = [torch.empty_like(hidden) for _ in range(size)]
            torch.distributed.all_gather(pieces, hidden, group=group)
            hidden = torch.cat(pieces)
        for out, part in zip(outs, hidden.split(lengths), strict=False):
            out.append(part)
    return [torch.cat(out) for out in outs]


def full_forward(config: DecoderConfig, sequences: list[Tensor]) -> list[Tensor]:
    layers, rotary = build(config, None, False), RotaryEmbedding(config.head_dim)
    outs = []
    for hidden in sequences:
        out, cu_seqlens = hidden, cu_seqlens_of([len(hidden)])
        for layer in layers:
            out = layer(out, rotary(torch.arange(len(hidden))), cu_seqlens, len(hidden))
        outs.append(out.detach())
    return outs


CONFIGS = {
    "gqa": CONFIG,
    "window": replace(CONFIG, window=3),
    "mha": replace(CONFIG, num_kv_heads=4),
    "softcap": replace(CONFIG, attention_softcap=2.0),
}
CASES = [("contiguous", case) for case in CONFIGS]
CASES += [(cached, case) for cached in ("paged", "small-pool") for case in ("gqa", "window")]


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("cached", "case"), CASES)
def test_decoding_equals_the_full_forward(ranks: RankPool, cached: str, case: str, tp: int, sp: bool) -> None:
    torch.manual_seed(0)
    config = CONFIGS[case]
    sequences = [torch.randn(sum(step[i] for step in STEPS), config.hidden_size) for i in range(3)]
    expected = full_forward(config, sequences)
    arguments = (cached, config, sequences, STEPS, sp)
    results = [decode(None, *arguments)] if tp == 1 else ranks.run(decode, *arguments, world=tp)
    for outs in results:
        for ours, theirs in zip(outs, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cached", CACHES)
def test_steps_do_not_matter(cached: str) -> None:
    """All at once, one by one, or in chunks."""
    sequences = [torch.randn(6, CONFIG.hidden_size), torch.randn(6, CONFIG.hidden_size)]
    once = decode(None, cached, CONFIG, sequences, [[6, 6]], False)
    for steps in ([[1, 1]] * 6, [[2, 0], [4, 1], [0, 5]]):
        for ours, theirs in zip(decode(None, cached, CONFIG, sequences, steps, False), once, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
