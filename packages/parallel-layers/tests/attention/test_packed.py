"""packed_attention: each backend that runs on a CPU against a dense softmax written out, segment by segment."""

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from parallel_layers.attention import available_backends, reference, sdpa
from parallel_layers.attention.backends import BACKENDS, Backend
from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.attention.packed import lse_with_sinks, packed_attention
from parallel_layers.attention.reference import REFERENCE

CPU_BACKENDS = ["reference", "sdpa"]
LENGTHS = [11, 1, 0, 17, 6, 3]


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula of the docstring, one segment and one query head at a time."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bounds_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    outs, lses = [], []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens.tolist()), pairwise(bounds_k.tolist()), strict=True):
        heads = []
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = q[a:b, head] @ k[c:d, kv_head].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            place = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            distance = place - torch.arange(d - c)
            hidden = torch.zeros_like(scores, dtype=torch.bool)
            if causal:
                hidden |= distance < 0
            if window is not None:
                hidden |= distance.abs() >= window
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(b - a, 1)), dim=1)
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[:, None])
            heads.append((weights[:, : d - c] @ v[c:d, kv_head], lse))
        outs.append(torch.stack([out for out, _ in heads], 1))
        lses.append(torch.stack([lse for _, lse in heads], 1))
    return torch.cat(outs), torch.cat(lses)


def inputs(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    keys: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = tokens if keys is None else keys
    shapes = ((tokens, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim or head_dim))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def lse_of(
    backend: str,
    leaves: tuple[Tensor, ...],
    segments: Segments,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The log-sum-exp `[T, Q]` of the whole softmax, as the kernel of a backend returns it."""
    q, k, v = (x.detach() for x in leaves)
    scoring = Scoring(causal, window, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    _, lse = BACKENDS[backend].kernel.forward(q, k, v, segments, scoring)
    return (lse if sinks is None else lse_with_sinks(lse, sinks.detach())).T


def assert_same_with_gradients(ours: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    seed = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, seed), torch.autograd.grad(expected, leaves, seed), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


OPTIONS: dict[str, dict[str, Any]] = {
    "both ways": {"causal": False},
    "window": {"window": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
}
# Every set of options; tests/attention/test_gpu.py has the same table for the kernels.
CASES: dict[str, dict[str, Any]] = {
    ", ".join(names) or "causal": {key: value for name in names for key, value in OPTIONS[name].items()}
    for count in range(len(OPTIONS) + 1)
    for names in combinations(OPTIONS, count)
} | {"window of one": {"window": 1}, "scale": {"scale": 0.7}}


def able(backend: str, case: str) -> bool:
    row = BACKENDS[backend]
    return (row.softcap or "softcap" not in CASES[case]) and (row.lse or "sinks" not in CASES[case])


@pytest.mark.parametrize(
    ("backend", "case", "heads", "kv_heads"),
    [
        pytest.param(backend, case, *heads, marks=() if (number + turn) % 3 == 0 else pytest.mark.slow)
        for backend in CPU_BACKENDS
        for number, case in enumerate(case for case in CASES if able(backend, case))
        for turn, heads in enumerate([(4, 4), (4, 2), (6, 1)])
    ],
)
def test_equals_dense_softmax(backend: str, case: str, heads: int, kv_heads: int) -> None:
    """With every option, alone and with every other: output, gradients and log-sum-exp.

    A plain run has each set of options with one number of heads, in turn.
    """
    torch.manual_seed(0)
    leaves = inputs(sum(LENGTHS), heads, kv_heads)
    options = dict(CASES[case])
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    cu_seqlens = boundaries(LENGTHS)
    expected, expected_lse = dense_attention(*leaves, cu_seqlens, **options)
    arguments: tuple[Any, ...] = (*leaves, cu_seqlens, max(LENGTHS))
    if BACKENDS[backend].lse:
        lse = lse_of(backend, leaves, Segments.of(cu_seqlens, max(LENGTHS)), **options)
        torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-9, atol=1e-9)
    ours = packed_attention(*arguments, backend=backend, **options)
    assert_same_with_gradients(ours, expected, (*leaves, *([options["sinks"]] if "sinks" in options else [])))


@pytest.mark.parametrize("case", [case for case in CASES if able("reference", case)])
def test_the_reference_groups_segments_of_similar_length(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """As it does with long segments; a few short ones are one batch."""
    monkeypatch.setattr(reference, "_CHEAP_SCORES", 0)
    test_equals_dense_softmax("reference", case, 4, 2)


@pytest.mark.parametrize("value_dim", [8, 15])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_value_heads_may_be_smaller_or_larger(backend: str, value_dim: int) -> None:
    leaves = inputs(sum(LENGTHS), head_dim=12, value_dim=value_dim)
    cu_seqlens = boundaries(LENGTHS)
    ours = packed_attention(*leaves, cu_seqlens, max(LENGTHS), backend=backend)
    assert_same_with_gradients(ours, dense_attention(*leaves, cu_seqlens)[0], leaves)


@pytest.mark.parametrize("head_dim", [1, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_head_sizes(backend: str, head_dim: int) -> None:
    leaves = inputs(sum(LENGTHS), head_dim=head_dim)
    cu_seqlens = boundaries(LENGTHS)
    ours = packed_attention(*leaves, cu_seqlens, max(LENGTHS), backend=backend)
    assert_same_with_gradients(ours, dense_attention(*leaves, cu_seqlens)[0], leaves)


@pytest.mark.parametrize("case", ["causal", "both ways", "window"])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_more_or_fewer_keys_than_queries(backend: str, case: str) -> None:
    """Queries are the last of the keys' places; a query without any key gives zero and -inf."""
    lengths_q, lengths_k = [3, 1, 4, 0, 5, 2], [7, 1, 2, 3, 0, 2]
    leaves = inputs(sum(lengths_q), keys=sum(lengths_k))
    bounds = {"cu_seqlens": boundaries(lengths_q), "cu_seqlens_k": boundaries(lengths_k)}
    ours = packed_attention(*leaves, **bounds, max_seqlen=5, max_seqlen_k=7, backend=backend, **CASES[case])
    expected, expected_lse = dense_attention(*leaves, **bounds, **CASES[case])
    assert_same_with_gradients(ours, expected, leaves)
    assert not ours[8:13].any()
    if backend == "reference":
        segments = Segments.of(bounds["cu_seqlens"], 5, bounds["cu_seqlens_k"], 7)
        torch.testing.assert_close(lse_of(backend, leaves, segments, **CASES[case]), expected_lse.detach())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_used_keys(backend: str) -> None:
    """A cache with room: only the first keys of each stretch exist, whatever the rest holds."""
    room, used, lengths_q = 9, [5, 0, 9, 2], [2, 0, 3, 1]
    q, k, v = (x.detach() for x in inputs(sum(lengths_q), keys=room * len(used)))
    cu_k = boundaries([room] * len(used))
    existing = torch.cat([torch.arange(room * i, room * i + n) for i, n in enumerate(used)])
    expected, _ = dense_attention(q, k[existing], v[existing], boundaries(lengths_q), cu_seqlens_k=boundaries(used))
    missing = torch.ones(len(k), dtype=torch.bool)
    missing[existing] = False
    k[missing], v[missing] = 1e30, float("nan")
    used_k = torch.tensor(used).int()
    ours = packed_attention(
        q, k, v, boundaries(lengths_q), 3, cu_seqlens_k=cu_k, max_seqlen_k=room, used_k=used_k, backend=backend
    )
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="used_k is for inference"):
        packed_attention(q.requires_grad_(), k, v, boundaries(lengths_q), 3, cu_seqlens_k=cu_k, used_k=used_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_segment_never_feels_another_bit_for_bit(backend: str, dtype: torch.dtype) -> None:
    """Every other segment's data changed (to NaN, even): this one's output and gradients keep every bit."""
    torch.manual_seed(0)
    lengths = [11, 1, 17, 6, 70, 0, 13]
    cu_seqlens = boundaries(lengths)
    data = [x.detach().to(dtype) for x in inputs(sum(lengths))]
    seed = torch.randn(sum(lengths), 4, 8).to(dtype)

    def run(tensors: list[Tensor], seed: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = packed_attention(*leaves, cu_seqlens, max(lengths), backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    before = run(data, seed)
    for start, end in pairwise(cu_seqlens.tolist()):
        others = torch.ones(sum(lengths), dtype=torch.bool)
        others[start:end] = False
        for value in (3.0, float("nan")):
            perturbed = [torch.where(others[:, None, None], x * value, x) for x in (*data, seed)]
            after = run(perturbed[:3], perturbed[3])
            for x, y in zip(before, after, strict=True):
                assert torch.equal(x[start:end], y[start:end])


@settings(max_examples=12, deadline=None)
@given(data=st.data(), backend=st.sampled_from(CPU_BACKENDS), window=st.none() | st.integers(1, 300))
def test_packed_equals_one_by_one(data: st.DataObject, backend: str, window: int | None) -> None:
    """Empty, single, short and long segments, whose total divides nothing; and each keeps its bits among others."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 31, 64, 65, 129]), min_size=1, max_size=6))
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    torch.manual_seed(sum(lengths))
    cu_seqlens, (start, end) = boundaries(lengths), boundaries(lengths)[chosen : chosen + 2].tolist()
    leaves, seed = inputs(sum(lengths), 2, 1, 4), torch.randn(sum(lengths), 2, 4).double()
    arguments = {"window": window, "backend": backend}
    if BACKENDS[backend].softcap:
        arguments["softcap"] = data.draw(st.none() | st.just(1.5))
    if BACKENDS[backend].lse and data.draw(st.booleans()):
        arguments["sinks"] = torch.randn(2).double()
    packed = packed_attention(*leaves, cu_seqlens, max(lengths), **arguments)
    alone = [
        packed_attention(*parts, boundaries([len(parts[0])]), len(parts[0]), **arguments)
        for parts in zip(*(leaf.split(lengths) for leaf in leaves), strict=True)
    ]
    assert_same_with_gradients(packed, torch.cat(alone), leaves)

    others = torch.ones(sum(lengths), 1, 1, dtype=torch.bool)
    others[start:end] = False
    results = []
    for change in (False, True):
        changed = [
            torch.where(others & change, x.detach() * 3 + 1, x.detach()).requires_grad_() for x in (*leaves, seed)
        ]
        out = packed_attention(*changed[:3], cu_seqlens, max(lengths), **arguments)
        results.append([out, *torch.autograd.grad(out, changed[:3], changed[3])])
    assert all(torch.equal(x[start:end], y[start:end]) for x, y in zip(*results, strict=True))


def forward_of_some(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Stands for the flash kernels, some of which refuse empty tensors."""
    assert q.numel()
    assert k.numel()
    return REFERENCE.forward(q, k, *rest)


def backward_of_some(d_out: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    assert q.numel()
    assert k.numel()
    return REFERENCE.backward(d_out, q, k, *rest)


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "never-empty"])
@pytest.mark.parametrize(("lengths", "lengths_k"), [([], []), ([0], [0]), ([0, 0, 0], [0, 4, 0]), ([3, 1], [0, 0])])
def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch, backend: str, lengths: list[int], lengths_k: list[int]) -> None:
    """No queries, no keys, or neither."""
    kernel = Kernel(forward_of_some, backward_of_some)
    monkeypatch.setitem(BACKENDS, "never-empty", Backend("nothing", lambda: True, kernel))
    leaves = inputs(sum(lengths), keys=sum(lengths_k))
    bounds = {"cu_seqlens": boundaries(lengths), "cu_seqlens_k": boundaries(lengths_k)}
    out = packed_attention(*leaves, **bounds, max_seqlen=3, max_seqlen_k=4, backend=backend)
    assert out.shape == (sum(lengths), 4, 8)
    assert not out.any()
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()
    if backend != "sdpa":
        sinks = torch.randn(4).double()
        out = packed_attention(*leaves, **bounds, max_seqlen=3, max_seqlen_k=4, sinks=sinks, backend=backend)
        assert not out.any()


def test_a_long_segment_in_blocks() -> None:
    """Longer than the reference's block of queries, with the keys that the mask excludes skipped."""
    torch.manual_seed(0)
    lengths = [300, 5, 290]
    leaves = inputs(sum(lengths), 2, 1)
    for options in ({}, {"window": 40}, {"window": 150, "causal": False}):
        ours = packed_attention(*leaves, boundaries(lengths), 300, **options)
        assert_same_with_gradients(ours, dense_attention(*leaves, boundaries(lengths), **options)[0], leaves)


@pytest.mark.parametrize("case", ["both ways", "window", "both ways, window"])
def test_masks_in_blocks_and_keys_of_groups_once(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """sdpa with a mask: no mask above the bound, and as many query heads as key heads, or torch repeats keys."""
    monkeypatch.setattr(sdpa, "_MAX_MASK", 1000)
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
        seen.append((q.shape[1], k.shape[1], mask.numel()))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options)

    torch.manual_seed(0)
    leaves = inputs(sum(LENGTHS), 6, 2)
    cu_seqlens = boundaries(LENGTHS)
    monkeypatch.setattr(sdpa, "F", SimpleNamespace(scaled_dot_product_attention=spy, pad=torch.nn.functional.pad))
    ours = packed_attention(*leaves, cu_seqlens, max(LENGTHS), backend="sdpa", **CASES[case])
    assert len(seen) == 6  # blocks of 3 queries: 6 segments, 3 heads a group, 17 keys
    assert all(heads == kv_heads and size <= 1000 for heads, kv_heads, size in seen)
    assert_same_with_gradients(ours, dense_attention(*leaves, cu_seqlens, **CASES[case])[0], leaves)


def test_a_sinks_gradient_knows_nothing_of_the_outputs_last_rounding() -> None:
    """A query's only key gives its value exactly, whatever the sink then leaves of it: in bf16, too."""
    torch.manual_seed(0)
    tokens, cu_seqlens = 40, boundaries([1] * 40)
    leaves = [x.bfloat16() for x in inputs(tokens)]
    sinks = torch.randn(4, requires_grad=True)
    seed = torch.randn(tokens, 4, 8).bfloat16()

    def gradient(dtype: torch.dtype, sinks: Tensor) -> Tensor:
        out = packed_attention(*(x.to(dtype) for x in leaves), cu_seqlens, 1, sinks=sinks)
        return torch.autograd.grad(out, sinks, seed.to(dtype))[0]

    truth = gradient(torch.float64, sinks.double())
    torch.testing.assert_close(gradient(torch.bfloat16, sinks).double(), truth, rtol=1e-5, atol=1e-5)


def test_gradcheck() -> None:
    leaves = inputs(6, heads=2, kv_heads=1, head_dim=3)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    cu_seqlens = boundaries([4, 0, 1, 1])
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: packed_attention(q, k, v, cu_seqlens, 4, sinks=sinks, softcap=3.0, window=3),
        (*leaves, sinks),
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    window=st.none() | st.integers(1, 50),
    causal=st.booleans(),
)
def test_backends_agree(
    lengths: list[int], groups: int, kv_heads: int, head_dim: int, window: int | None, causal: bool
) -> None:
    torch.manual_seed(0)
    leaves = inputs(sum(lengths), groups * kv_heads, kv_heads, head_dim)
    cu_seqlens = boundaries(lengths)
    outs = [
        packed_attention(*leaves, cu_seqlens, max(lengths), causal=causal, window=window, backend=backend)
        for backend in CPU_BACKENDS
    ]
    assert_same_with_gradients(outs[0], outs[1], leaves)


# The reference compiles in every run in decoder/test_graphs.py.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return packed_attention(q, k, v, cu_seqlens, max_seqlen, window=4, backend=backend).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 2, 9], [3, 0, 8, 1, 11]):
        leaves = inputs(sum(lengths))
        arguments = (*leaves, boundaries(lengths), max(lengths))
        expected, ours = loss(*arguments), compiled(*arguments)
        assert_same_with_gradients(ours, expected, leaves)


def test_refusals_say_why_and_what_can() -> None:
    q, k, v = (x.detach() for x in inputs(6))
    cu_seqlens = boundaries([6])
    for options, message in (
        ({"backend": "fast"}, r"backend='fast' is unknown; use 'auto' or one of flash-attn-4, flash-attn, varlen"),
        ({"backend": "sdpa", "softcap": 1.0}, r"backend='sdpa' cannot do this case: it has no soft-cap; .* reference"),
        (
            {"backend": "sdpa", "sinks": torch.zeros(4).double()},
            r"'sdpa' cannot do this case: it has no log-sum-exp \(which attention sinks need, too\); .* reference",
        ),
        ({"window": 0}, r"window=0 tokens"),
        ({"softcap": 0.0}, r"softcap=0\.0 must be positive; use None for no soft-cap"),
        ({"sinks": torch.zeros(3).double()}, r"sinks \(3,\) must hold one score for each of the 4 query heads"),
    ):
        with pytest.raises(ValueError, match=message):
            packed_attention(q, k, v, cu_seqlens, 6, **options)
    with pytest.raises(ValueError, match=r"3 query heads cannot share 2 key-value heads evenly"):
        packed_attention(q[:, :3], k, v, cu_seqlens, 6)
    with pytest.raises(ValueError, match=r"must have one dtype"):
        packed_attention(q, k.float(), v, cu_seqlens, 6)
    with pytest.raises(
        ValueError, match=r"cu_seqlens must be 1-D int32, got \(2,\) torch.int64; use cu_seqlens.int\(\)"
    ):
        packed_attention(q, k, v, cu_seqlens.long(), 6)
    with pytest.raises(ValueError, match=r"6 queries but 5 keys; pass cu_seqlens_k"):
        packed_attention(q, k[:5], v[:5], cu_seqlens, 6)
    for backend in (*CPU_BACKENDS, "exact"):
        for lengths in ([], [3, 3]):
            with pytest.raises(ValueError, match=rf"cu_seqlens_k has {len(lengths)} segments and cu_seqlens 1; give"):
                packed_attention(q, k, v, cu_seqlens, 6, cu_seqlens_k=boundaries(lengths), backend=backend)
        with pytest.raises(ValueError, match=r"used_k has 2 entries for 1 segments of cu_seqlens"):
            packed_attention(q, k, v, cu_seqlens, 6, used_k=torch.tensor([3, 3]).int(), backend=backend)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_dtype_that_no_backend_takes(dtype: torch.dtype, backend: str) -> None:
    q = torch.ones(6, 2, 8).to(dtype)
    with pytest.raises(ValueError, match=rf"no backend can do this case: flash-attn-4: .*; sdpa: .*, not {dtype}; ref"):
        packed_attention(q, q, q, boundaries([6]), 6, backend=backend)


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "exact"])
def test_autocast_changes_nothing(backend: str) -> None:
    q, k, v = (x.detach().float() for x in inputs(9))
    arguments = (q, k, v, boundaries([4, 5]), 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = packed_attention(*arguments, backend=backend)
    assert torch.equal(out, packed_attention(*arguments, backend=backend))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU backends are here")
@pytest.mark.parametrize("backend", ["flash-attn-4", "flash-attn", "varlen"])
def test_a_missing_backend_is_refused_by_name(backend: str) -> None:
    q, k, v = (x.detach() for x in inputs(6))
    with pytest.raises(
        ValueError, match=rf"backend='{backend}' cannot do this case: it needs .* use 'auto' or one of sdpa"
    ):
        packed_attention(q, k, v, boundaries([6]), 6, backend=backend)
    assert backend not in available_backends()


def test_available_backends() -> None:
    assert set(CPU_BACKENDS) <= set(available_backends()) <= set(BACKENDS)


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "exact"])
def test_a_maximum_below_the_longest_segment_is_refused(backend: str) -> None:
    q, bounds = torch.randn(38, 2, 8), boundaries(LENGTHS)
    with pytest.raises(
        ValueError, match=r"max_seqlen=16 is less than the longest segment, 17 tokens; pass at least 17"
    ):
        packed_attention(q, q, q, bounds, 16, backend=backend)
    options = {"cu_seqlens_k": bounds, "max_seqlen_k": 16, "backend": backend}
    with pytest.raises(ValueError, match="max_seqlen_k=16 is less than the longest segment, 17 tokens"):
        packed_attention(q, q, q, bounds, 17, **options)
    used = torch.tensor([11, 1, 0, 16, 6, 3], dtype=torch.int32)
    packed_attention(q, q, q, bounds, 17, used_k=used, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "exact"])
@pytest.mark.parametrize(
    "bounds", [[0, 4, 3, 6], [0, 4, 7], [1, 6], [-1, 6], []], ids=["decrease", "beyond", "start", "negative", "none"]
)
def test_boundaries_that_do_not_fit_the_tokens_are_refused(bounds: list[int], backend: str) -> None:
    """They gave numbers, or an IndexError."""
    q, wrong = torch.randn(6, 2, 8), torch.tensor(bounds, dtype=torch.int32)
    right = boundaries([6] + [0] * (len(bounds) - 2))
    text = "must start at 0, never decrease, and end at or before the 6 tokens" if bounds else "has 0 entries; give at"
    with pytest.raises(ValueError, match=rf"cu_seqlens .*{text}"):
        packed_attention(q, q, q, wrong, 6, backend=backend)
    with pytest.raises(ValueError, match=rf"cu_seqlens_k .*{text}"):
        packed_attention(q, q, q, right, 6, cu_seqlens_k=wrong, backend=backend)


@pytest.mark.parametrize("used", [[-1, 2], [5, 2], [4, 3]], ids=["negative", "beyond", "maximum"])
def test_valid_keys_outside_of_their_segments_are_refused(used: list[int]) -> None:
    """They were keys of the next segment."""
    q = torch.randn(7, 2, 8)
    options: Any = {"cu_seqlens_k": boundaries([4, 3]), "max_seqlen_k": 4 if used[0] != 4 else 3}
    with pytest.raises(ValueError, match=r"used_k \[.*\] must be in 0\.\.\[(4|3), 3\], the keys of each segment"):
        packed_attention(q, q, q, boundaries([4, 3]), 4, used_k=torch.tensor(used).int(), **options)


def test_a_compiled_maximum_below_the_longest_segment_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(packed_attention, fullgraph=True, backend="aot_eager")
    q = torch.randn(38, 2, 8)
    with pytest.raises(RuntimeError, match="a segment is longer than max_seqlen"):
        compiled(q, q, q, boundaries(LENGTHS), 16, backend="sdpa")
