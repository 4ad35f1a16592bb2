"""Decoding with a cache, step by step, equals one forward over everything."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.inference import PagedKVCache
from parallel_layers.linear.execution import Placement
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.module.sharding import load_full_
from parallel_layers.moe import MoEConfig
from parallel_layers.rotary.embedding import RotaryEmbedding
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32)
LAYERS = 2
# Tokens that each of the three sequences brings, forward by forward: prompts, single tokens, nothing, a chunk.
STEPS = [[5, 1, 0], [1, 1, 4], [1, 0, 1], [0, 3, 1], [1, 1, 1], [1, 1, 1]]
Steps = Sequence[Sequence[int]]
ROOM = 12
CACHES = {
    "ample": partial(PagedKVCache, block_size=4),
    "small-pool": partial(PagedKVCache, block_size=2, num_blocks=14),  # less than three sequences' room
}


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def build(
    config: DecoderConfig, group: ProcessGroup | None, sequence_parallel: bool, device: str = "cpu"
) -> nn.ModuleList:
    """The same layers at every tp: drawn whole, each rank keeps its part."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        whole = {name: p.detach() for name, p in DecoderLayer(config).named_parameters()}
        for tensor in whole.values():
            tensor.normal_(std=0.3, generator=generator)
        layer = DecoderLayer(config, placement=Placement(group, sequence_parallel), device=device)
        load_full_(layer, whole)
        layers.append(layer)
    return layers


@torch.no_grad()
def decode(
    group: ProcessGroup | None, cached: str, config: DecoderConfig, sequences: list[Tensor], steps: Steps, sp: bool
) -> list[Tensor]:
    """Each sequence's outputs, made in the given steps; with sequence parallelism each forward is padded to divide."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    device = "cuda" if group is not None and torch.distributed.get_backend(group) == "nccl" else "cpu"
    layers, rotary = build(config, group, sp, device), RotaryEmbedding(config.head_dim, device=device)
    cache = CACHES[cached]([layer.self_attn.cache_shape for layer in layers], len(sequences), ROOM, device=device)
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
        hidden, cu_seqlens = torch.cat(parts).to(device), cu_seqlens_of(lengths).to(device)
        hidden, tables = hidden.chunk(size)[rank] if sp else hidden, rotary(torch.cat(positions).to(device))
        for i, layer in enumerate(layers):
            hidden = layer(hidden, tables, cu_seqlens, max(lengths), cache=cache.layer(i))
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


EXPERTS = MoEConfig(num_experts=4, top_k=2, intermediate_size=8, shared_intermediate_size=8)
CONFIGS = {
    "gqa": CONFIG,
    "window": replace(CONFIG, window=3),
    "mha": replace(CONFIG, num_kv_heads=4),
    "mqa": replace(CONFIG, num_kv_heads=1),  # at tp 2 both ranks keep the one head
    "softcap": replace(CONFIG, attention_softcap=2.0),
    "qk norm, sinks, window, experts": replace(CONFIG, qk_norm="head", attention_sinks=True, window=4, moe=EXPERTS),
}
CASES = [("ample", case) for case in CONFIGS] + [("small-pool", "gqa"), ("small-pool", "window")]


def check(pool: RankPool | None, cached: str, case: str, tp: int, sp: bool) -> None:
    torch.manual_seed(0)
    config = CONFIGS[case]
    sequences = [torch.randn(sum(step[i] for step in STEPS), config.hidden_size) for i in range(3)]
    expected = full_forward(config, sequences)
    arguments = (cached, config, sequences, STEPS, sp)
    results = [decode(None, *arguments)] if pool is None else pool.run(decode, *arguments, world=tp)
    for outs in results:
        for ours, theirs in zip(outs, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# One rank and two, with sequence parallelism and without it; --slow has all.
DECODED_IN_EVERY_RUN = {
    ("ample", "window", 1, False),
    ("ample", "softcap", 1, False),
    ("ample", "gqa", 2, True),
    ("ample", "mha", 2, False),
    ("ample", "mqa", 2, True),
    ("ample", "qk norm, sinks, window, experts", 1, False),
    ("ample", "qk norm, sinks, window, experts", 2, True),
    ("small-pool", "gqa", 1, False),
    ("small-pool", "window", 2, False),
}


@pytest.mark.parametrize(
    ("cached", "case", "tp", "sp"),
    [
        pytest.param(*case, *place, marks=[] if (*case, *place) in DECODED_IN_EVERY_RUN else pytest.mark.slow)
        for case in CASES
        for place in ((1, False), (2, False), (2, True))
    ],
)
def test_decoding_equals_the_full_forward(ranks: RankPool, cached: str, case: str, tp: int, sp: bool) -> None:
    check(None if tp == 1 else ranks, cached, case, tp, sp)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("cached", "case"), CASES)
def test_decoding_on_gpus(nccl_ranks: RankPool, cached: str, case: str, tp: int, sp: bool) -> None:
    """In fp32, against the full forward on a CPU."""
    check(nccl_ranks, cached, case, tp, sp)


@pytest.mark.parametrize("cached", CACHES)
def test_steps_do_not_matter(cached: str) -> None:
    """All at once, one by one, or in chunks."""
    sequences = [torch.randn(6, CONFIG.hidden_size), torch.randn(6, CONFIG.hidden_size)]
    once = decode(None, cached, CONFIG, sequences, [[6, 6]], False)
    for steps in ([[1, 1]] * 6, [[2, 0], [4, 1], [0, 5]]):
        for ours, theirs in zip(decode(None, cached, CONFIG, sequences, steps, False), once, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["gqa", "window"])
@pytest.mark.parametrize("cached", CACHES)
def test_a_sequence_never_feels_another_bit_for_bit(cached: str, case: str) -> None:
    """A sequence does not depend on the other sequences of the cache, nor on their remains in memory."""
    torch.manual_seed(0)
    sequences = [torch.randn(sum(step[i] for step in STEPS), CONFIG.hidden_size) for i in range(3)]
    before = decode(None, cached, CONFIGS[case], sequences, STEPS, False)
    for kept in range(3):
        changed = [x if i == kept else 3 * x + 1 for i, x in enumerate(sequences)]
        assert torch.equal(decode(None, cached, CONFIGS[case], changed, STEPS, False)[kept], before[kept])
