"""Ulysses and ring attention against attention on one rank: outputs and every gradient."""

import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence
from parallel_layers.attention.backends import BACKENDS, why_not
from parallel_layers.attention.context_parallel.ring import ring_attention
from parallel_layers.attention.context_parallel.sequence_layout import gather_sequence, split_sequence
from parallel_layers.attention.context_parallel.ulysses import exchange_heads, ulysses_attention
from parallel_layers.attention.packed import packed_attention
from parallel_layers.distributed.collectives import all_to_all
from parallel_layers.testing import RankPool

# Attention, and the layout that it works on.
ATTENTIONS = {"ulysses": (ulysses_attention, "contiguous"), "ring": (ring_attention, "zigzag")}
LENGTHS = {
    "ragged": [11, 1, 0, 17, 6, 5],  # 40
    "one long": [40],
    "all short": [1] * 10 + [0] * 5 + [2] * 15,
    "long in the middle": [3, 33, 4],
    "chunks": [5] * 8,
}
HEADS = {"4 over 2": (4, 2), "4 over 4": (4, 4), "6 over 3": (6, 3), "5 over 1": (5, 1), "14 over 2": (14, 2)}


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run_sharded(
    group: ProcessGroup,
    name: str,
    tensors: list[Tensor],
    sinks: Tensor | None,
    lengths: list[int],
    options: dict[str, Any],
) -> list[Tensor]:
    """The gathered output, the gathered gradients of q, k, v, and this rank's share of the sinks'."""
    attention, layout = ATTENTIONS[name]
    device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
    tensors = [x.to(device) for x in tensors]
    *leaves, seed = (split_sequence(x, group, layout=layout).clone() for x in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if sinks is not None:
        sinks = sinks.to(device, copy=True).requires_grad_()
        options = {**options, "sinks": sinks}
    out = attention(*leaves, boundaries(lengths).to(device), max(lengths, default=0), group=group, **options)
    out.backward(seed)
    sharded = [out.detach(), *(leaf.grad for leaf in leaves)]
    gathered = [gather_sequence(x, group, layout=layout) for x in sharded]
    return gathered if sinks is None else [*gathered, sinks.grad]


def check(
    ranks: RankPool,
    name: str,
    lengths: list[int],
    world: int,
    heads: tuple[int, int] = (4, 2),
    value_dim: int = 8,
    with_sinks: bool = False,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    tensors = [torch.randn(tokens, count, 8) for count in (heads[0], heads[1])]
    tensors += [torch.randn(tokens, heads[1], value_dim), torch.randn(tokens, heads[0], value_dim)]
    sinks = torch.randn(heads[0]) if with_sinks else None
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    wide = None if sinks is None else sinks.double().requires_grad_()
    out = packed_attention(*leaves, boundaries(lengths), max(lengths, default=0), sinks=wide, **options)
    gradients = torch.autograd.grad(out, leaves if wide is None else [*leaves, wide], tensors[3].double())
    expected = [out, *gradients]
    results = ranks.run(run_sharded, name, tensors, sinks, lengths, options, world=world)
    for i, truth in enumerate(expected):
        if i == 4:
            parts = [sum(result[4] for result in results)]
        else:
            parts = [result[i] for result in results]
        for part in parts:
            torch.testing.assert_close(part, truth.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_equals_one_rank(ranks: RankPool, name: str, lengths: str, world: int) -> None:
    check(ranks, name, LENGTHS[lengths], world)


@pytest.mark.parametrize(("name", "world"), [("ulysses", 2), ("ulysses", 4), ("ring", 2)])
@pytest.mark.parametrize("heads", HEADS)
def test_any_number_of_heads(ranks: RankPool, heads: str, name: str, world: int) -> None:
    check(ranks, name, LENGTHS["ragged"], world, HEADS[heads])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_options(ranks: RankPool, name: str) -> None:
    check(ranks, name, LENGTHS["ragged"], 2, value_dim=6, softcap=1.5, scale=0.7)
    check(ranks, name, LENGTHS["ragged"], 2, value_dim=11)
    check(ranks, name, LENGTHS["ragged"], 2, (5, 1), with_sinks=True)
    check(ranks, name, LENGTHS["ragged"], 4, (14, 2), with_sinks=True)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_sinks_gradient_knows_nothing_of_the_outputs_last_rounding(ranks: RankPool, name: str) -> None:
    """A query's only key gives its value exactly, whatever the sink then leaves of it: in bf16, too."""
    torch.manual_seed(0)
    lengths = [1] * 40
    tensors = [torch.randn(40, heads, 8).bfloat16() for heads in (4, 2, 2, 4)]
    sinks = torch.randn(4)
    wide, seed = sinks.double().requires_grad_(), tensors[3].double()
    out = packed_attention(*(x.double() for x in tensors[:3]), boundaries(lengths), 1, sinks=wide)
    results = ranks.run(run_sharded, name, tensors, sinks, lengths, {}, world=2)
    found = sum(result[4].double() for result in results)
    torch.testing.assert_close(found, torch.autograd.grad(out, wide, seed)[0], rtol=1e-5, atol=1e-5)


GPU_LENGTHS = [700, 1, 0, 90, 1000, 257]


def check_on_gpus(pool: RankPool, name: str, world: int, with_sinks: bool = False, **options: Any) -> None:
    """bf16 over NCCL: output and gradients as close to fp64 as bf16 is."""
    torch.manual_seed(0)
    lengths = GPU_LENGTHS
    tensors = [torch.randn(sum(lengths), heads, 64).bfloat16() for heads in (6, 3, 3, 6)]
    sinks = torch.randn(6).bfloat16() if with_sinks else None
    leaves = [x.double().requires_grad_() for x in (tensors[:3] if sinks is None else [*tensors[:3], sinks])]
    asked = {key: value for key, value in options.items() if key != "backend"}
    if sinks is not None:
        asked["sinks"] = leaves[3]
    out = packed_attention(*leaves[:3], boundaries(lengths), max(lengths, default=0), **asked)
    expected = [out, *torch.autograd.grad(out, leaves, tensors[3].double())]
    results = pool.run(run_sharded, name, tensors, sinks, lengths, options, world=world)
    for i, truth in enumerate(expected):
        ours = results[0][i].double() if i < 4 else sum(result[4].double() for result in results)
        assert (ours - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_on_gpus(nccl_ranks: RankPool, name: str, with_sinks: bool, window: int | None) -> None:
    """With the kernel that `auto` picks."""
    check_on_gpus(nccl_ranks, name, 2, with_sinks, window=window)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_on_four_gpus(four_nccl_ranks: RankPool, name: str, window: int | None) -> None:
    """More ranks than key heads that divide; chunks that several ranks' windows reach."""
    check_on_gpus(four_nccl_ranks, name, 4, True, window=window)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "exact"])
def test_every_backend_on_two_gpus(nccl_ranks: RankPool, backend: str, name: str, window: int | None) -> None:
    """A ring needs the log-sum-exp, and says so; within a window no backend does."""
    reason = why_not(backend, "cuda", torch.bfloat16, 64, softcap=False, lse=name == "ring" and window is None)
    if reason is None:
        check_on_gpus(nccl_ranks, name, 2, window=window, backend=backend)
        return
    with pytest.raises(ValueError, match=re.escape(f"backend='{backend}' cannot do this case: {reason}")):
        check_on_gpus(nccl_ranks, name, 2, window=window, backend=backend)


@pytest.mark.parametrize(
    ("name", "window"),
    [*(("ring", window) for window in (1, 2, 4, 5, 6, 11, 12, 16, 31, 40, 100)), ("ulysses", 6), ("ulysses", 100)],
)
def test_windows(ranks: RankPool, name: str, window: int) -> None:
    """On 4 ranks a chunk of the zigzag has 5 tokens: windows within a chunk, over several, over all of them."""
    check(ranks, name, LENGTHS["long in the middle"], 4, window=window)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_windows_with_other_options(ranks: RankPool, name: str) -> None:
    check(ranks, name, LENGTHS["ragged"], 2, (5, 1), window=12, value_dim=6, softcap=1.5, scale=0.7, with_sinks=True)
    check(ranks, name, LENGTHS["all short"], 4, window=2)


def test_ulysses_sees_both_ways(ranks: RankPool) -> None:
    check(ranks, "ulysses", LENGTHS["ragged"], 2, causal=False)
    check(ranks, "ulysses", LENGTHS["ragged"], 2, causal=False, window=3)


def received_by_halo(group: ProcessGroup, window: int) -> int:
    """How many tokens' keys arrive from other ranks."""
    from parallel_layers.attention.context_parallel import ring

    counts = []

    def counting(x: Tensor, group: ProcessGroup, **sizes: list[int]) -> Tensor:
        counts.append(sum(sizes["output_sizes"]))
        return all_to_all(x, group, **sizes)

    ring.all_to_all = counting
    try:
        q, k, v = torch.randn(3, 10, 2, 8)
        ring_attention(q, k, v, boundaries([40]), 40, group=group, window=window)
    finally:
        ring.all_to_all = all_to_all
    return sum(counts)


@pytest.mark.parametrize(
    # Chunks 0..7 of 5 tokens; ranks hold (0, 7), (1, 6), (2, 5), (3, 4).
    ("window", "tokens"),
    [(1, [0, 0, 0, 0]), (6, [5, 10, 10, 5]), (7, [10, 15, 20, 10]), (39, [30, 25, 20, 15])],
)
def test_chunks_outside_the_window_are_not_sent(ranks: RankPool, window: int, tokens: list[int]) -> None:
    assert ranks.run(received_by_halo, window, world=4) == tokens


@settings(max_examples=25, deadline=None)
@example(name="ring", world=2, lengths=[], heads=(1, 1), window=None)
@example(name="ring", world=2, lengths=[0, 0], heads=(1, 1), window=3)
@example(name="ulysses", world=3, lengths=[0], heads=(2, 2), window=None)
@given(
    name=st.sampled_from(sorted(ATTENTIONS)),
    world=st.integers(2, 4),
    lengths=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 16, 31]), max_size=7),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    window=st.none() | st.integers(1, 40),
)
def test_any_lengths(
    ranks: RankPool, name: str, world: int, lengths: list[int], heads: tuple[int, int], window: int | None
) -> None:
    """Packed for a number of ranks that divides neither their total nor the heads."""
    packed = PackedSequence.from_sequences([torch.zeros(n, dtype=torch.int64) for n in lengths], multiple_of=2 * world)
    group, kv_heads = heads
    padded = packed.cu_seqlens.diff().tolist()
    check(ranks, name, padded, world, (group * kv_heads, kv_heads), window=window)


@pytest.mark.parametrize(
    ("name", "window", "with_sinks"),
    [("ring", None, True), ("ring", 7, False), ("ulysses", None, False), ("ulysses", 7, True)],
)
def test_a_segment_never_feels_another_bit_for_bit(
    ranks: RankPool, name: str, window: int | None, with_sinks: bool
) -> None:
    """Every other segment's data changed: this one's output and gradients keep every bit, on whatever ranks."""
    torch.manual_seed(0)
    lengths = [13, 1, 22, 4]
    tensors = [torch.randn(40, heads, 8) for heads in (4, 2, 2, 4)]
    sinks = torch.randn(4) if with_sinks else None
    arguments = (sinks, lengths, {"window": window})
    before = ranks.run(run_sharded, name, tensors, *arguments, world=4)[0]
    for start, end in pairwise(boundaries(lengths).tolist()):
        others = torch.ones(40, 1, 1, dtype=torch.bool)
        others[start:end] = False
        changed = [torch.where(others, 3 * x + 1, x) for x in tensors]
        after = ranks.run(run_sharded, name, changed, *arguments, world=4)[0]
        for x, y in zip(before[:4], after[:4], strict=True):
            assert torch.equal(x[start:end], y[start:end])


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", [[5], [9, 8], [3, 22, 4], [0], []], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_boundaries_that_end_before_the_tokens(
    ranks: RankPool, name: str, lengths: list[int], window: int | None
) -> None:
    """40 tokens, of which the segments have fewer: no rank fails, while others wait, and no segment feels the rest."""
    torch.manual_seed(0)
    count = sum(lengths)
    q, k, v, seed = (torch.randn(40, heads, 8) for heads in (4, 2, 2, 4))
    seed[count:] = 0
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = packed_attention(*leaves, boundaries(lengths), max(lengths, default=0), window=window)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, seed)]
    for results in ranks.run(run_sharded, name, [q, k, v, seed], None, lengths, {"window": window}, world=2):
        for found, truth in zip(results, expected, strict=True):
            torch.testing.assert_close(found[:count], truth[:count], rtol=1e-5, atol=1e-5)


def compile_ulysses(group: ProcessGroup) -> list[list[list[Tensor]]]:
    torch._dynamo.reset()
    pairs = []

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return ulysses_attention(q, k, v, cu_seqlens, max_seqlen, group=group)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 5], [7, 0, 5]):
        leaves = [torch.randn(sum(lengths) // 2, heads, 8, requires_grad=True) for heads in (6, 3, 3)]
        outs = [run(*leaves, boundaries(lengths), max(lengths)) for run in (call, compiled)]
        pairs.append([[out.detach(), *torch.autograd.grad(out.square().sum(), leaves)] for out in outs])
    return pairs


@pytest.mark.slow
def test_ulysses_compiles_without_a_graph_break(ranks: RankPool) -> None:
    """With heads that have to be repeated or padded."""
    for pairs in ranks.run(compile_ulysses, world=2):
        for eager, compiled in pairs:
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def run_layouts(group: ProcessGroup, x: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    mine = split_sequence(leaf, group, layout=layout)
    whole = gather_sequence(mine, group, layout=layout)
    (mine * (group.rank() + 1)).sum().backward()
    return mine.detach(), whole.detach(), leaf.grad


@pytest.mark.parametrize(
    ("layout", "held"), [("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]])]
)
def test_layouts(ranks: RankPool, layout: str, held: list[list[int]]) -> None:
    x = torch.randn(8, 3)
    for rank, (mine, whole, gradient) in enumerate(ranks.run(run_layouts, x, layout, world=2)):
        assert torch.equal(mine, x[held[rank]])
        assert torch.equal(whole, x)
        for other in range(2):  # each rank learns the gradient of every token, from the rank that used it
            assert (gradient[held[other]] == other + 1).all()


def test_one_rank_is_plain_attention() -> None:
    q, k, v = torch.randn(3, 12, 2, 8)
    cu_seqlens = boundaries([5, 7])
    expected = packed_attention(q, k, v, cu_seqlens, 7)
    for attention, layout in ATTENTIONS.values():
        assert torch.equal(attention(q, k, v, cu_seqlens, 7, group=None), expected)
        assert split_sequence(q, None, layout=layout) is q
        assert gather_sequence(q, None, layout=layout) is q


def run_mistakes(group: ProcessGroup) -> list[str]:
    q, k, v = torch.randn(3, 6, 2, 8)
    calls = [
        lambda: split_sequence(q, group, layout="zigzag"),
        lambda: split_sequence(q, group, layout="spiral"),
        lambda: ring_attention(q, k, v, boundaries([12]), 12, group=group, causal=False),
        lambda: ring_attention(q, k, v, boundaries([12]), 12, group=group, backend="sdpa"),
        lambda: ring_attention(q[:3], k[:3], v[:3], boundaries([6]), 6, group=group),
        lambda: exchange_heads(lambda *_: q, q, k[:4], v[:4], group),
    ]
    for attention in (ring_attention, ulysses_attention):
        bounds, options = boundaries([12]), {"group": group}
        calls += [
            partial(attention, torch.randn(6, 3, 8), k, v, bounds, 12, **options),
            partial(attention, q[..., :4], k, v, bounds, 12, **options),
            partial(attention, q, k, v.bfloat16(), bounds, 12, **options),
            partial(attention, q, k, v, bounds.long(), 12, **options),
            partial(attention, q, k, v, boundaries([13]), 13, **options),
            partial(attention, q, k, v, bounds, 12, sinks=torch.zeros(3), **options),
            partial(attention, q, k, v, bounds, 12, window=0, **options),
            partial(attention, *(x.long() for x in (q, k, v)), bounds, 12, **options),
        ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError, match=r"\w") as error:
            call()
        messages.append(str(error.value))
    return messages


def test_mistakes_are_named(ranks: RankPool) -> None:
    for messages in ranks.run(run_mistakes, world=2):
        for message, part in zip(
            messages,
            (
                "6 tokens do not divide into 4 equal chunks (zigzag layout, 2 ranks); pack with multiple_of=4",
                "layout='spiral' is unknown; use one of contiguous, zigzag",
                "use ulysses_attention, which takes every option",
                "backend='sdpa' cannot do this case: it has no log-sum-exp",
                "3 tokens on a rank do not divide into two chunks",
                "6 queries but 4 keys on a rank",
                *[
                    "3 query heads cannot share 2 key-value heads evenly",
                    "takes q [T, Q, D], k [T, K, D], v [T, K, D'], got q (6, 2, 4), k (6, 2, 8), v (6, 2, 8)",
                    "q, k, v must have one dtype, got torch.float32, torch.float32, torch.bfloat16",
                    "cu_seqlens must be 1-D int32, got (2,) torch.int64",
                    "cu_seqlens [0, 13] must start at 0, never decrease, and end at or before the 12 tokens",
                    "sinks (3,) must hold one score for each of the 2 query heads",
                    "window=0 tokens",
                    "no backend can do this case",
                ]
                * 2,
            ),
            strict=True,
        ):
            assert part in message
