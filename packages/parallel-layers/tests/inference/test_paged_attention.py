"""Attention over blocks: what is gathered, and what flash-attn is asked for."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.attention import available_backends, packed_attention
from parallel_layers.attention.kernel_interface import Scoring, Segments
from parallel_layers.attention.reference import REFERENCE
from parallel_layers.inference import KVCache, PagedKVCache, paged_attention
from parallel_layers.inference.paged_attention import PagedKeys, flash_paged_attention, why_not_in_place

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 4
# Three sequences (the second brings nothing) and padding; blocks in any order.
NEW, USED = [2, 0, 1, 3], [7, 3, 5, 0]
TABLE = [[4, 0], [2, 2], [1, 5], [0, 0]]
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "sinks": {"sinks": torch.randn(HEADS, generator=torch.Generator().manual_seed(0))},
}


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def problem() -> tuple[Tensor, Tensor, Tensor, PagedKeys]:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 6, BLOCK, KV_HEADS, HEAD_DIM)
    places = PagedKeys(torch.tensor(TABLE, dtype=torch.int32), BLOCK, NEW, USED, max_gathered=100)
    return torch.randn(sum(NEW), HEADS, HEAD_DIM), keys, values, places


def expected(q: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
    k, v = (
        torch.cat([x[table].flatten(0, 1)[:used] for table, used in zip(TABLE, USED, strict=True)])
        for x in (keys, values)
    )
    return packed_attention(q, k, v, bounds(NEW), 3, cu_seqlens_k=bounds(USED), max_seqlen_k=7, **options)


@pytest.mark.parametrize("max_gathered", [1, 8, 100])
@pytest.mark.parametrize("case", CASES)
def test_gathered(case: str, max_gathered: int) -> None:
    q, keys, values, places = problem()
    places.max_gathered = max_gathered
    out = paged_attention.paged_attention(q, keys, values, places, CASES[case])
    torch.testing.assert_close(out, expected(q, keys, values, CASES[case]), rtol=1e-5, atol=1e-5)


def test_only_what_is_seen_is_gathered() -> None:
    """None of a sequence without queries; with a window, its keys before the first query's."""
    *_, places = problem()
    assert [run.cu_k.tolist() for run in places.runs(None)] == [[0, 7, 7, 12, 12]]
    assert [run.cu_k.tolist() for run in places.runs(3)] == [[0, 4, 4, 7, 7]]
    places.max_gathered = 7
    assert [run.cu_k.tolist() for run in places.runs(2)] == [[0, 3, 3, 5, 5]]
    assert [run.cu_k.tolist() for run in places.runs(6)] == [[0, 7, 7], [0, 5, 5]]


class FlashAttention(ModuleType):
    """Stands for the flash-attn package: the same mathematics over the blocks that it is given."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        return_attn_probs: bool,
        block_table: Tensor,
    ) -> Any:
        used = cu_seqlens_k.diff()
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(used.max()))
        k, v = (torch.cat([x[t].flatten(0, 1)[:n] for t, n in zip(block_table, used, strict=True)]) for x in (k, v))
        segments = Segments(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
        window = None if window_size[0] < 0 else window_size[0] + 1
        scoring = Scoring(causal, window, softmax_scale or q.shape[-1] ** -0.5, softcap or None)
        out, lse = REFERENCE.forward(q, k, v, segments, scoring)
        # flash-attn's log-sum-exp: +inf for a query without keys.
        return (out, lse.nan_to_num(neginf=torch.inf), None) if return_attn_probs else out


@pytest.mark.parametrize("case", CASES)
def test_flash_attention_reads_the_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttention("flash_attn"))
    q, keys, values, places = problem()
    out = flash_paged_attention(q, keys, values, places, CASES[case])
    torch.testing.assert_close(out, expected(q, keys, values, CASES[case]), rtol=1e-5, atol=1e-5)


def test_why_blocks_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys = torch.empty(1, HEADS, 64, dtype=torch.bfloat16), torch.empty(2, 256, KV_HEADS, 64, dtype=torch.bfloat16)
    reason = why_not_in_place(q, keys, keys)
    assert reason is not None
    if "flash-attn" not in available_backends():
        assert "parallel-layers[flash-attn]" in reason
    monkeypatch.setattr(paged_attention, "available_backends", lambda: ("flash-attn", "reference"))
    assert "on cpu" in str(why_not_in_place(q, keys, keys))
    q, keys = q.to("meta"), keys.to("meta")
    monkeypatch.setattr(paged_attention, "_DEVICES", {"meta"})
    assert why_not_in_place(q, keys, keys) is None
    assert "multiples of 256 tokens, not 16" in str(why_not_in_place(q, keys[:, :16], keys[:, :16]))
    assert "not 64 and 32" in str(why_not_in_place(q, keys, keys[..., :32]))
    assert "float32" in str(why_not_in_place(q.float(), keys, keys))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_paged_kernels_equal_the_contiguous_cache(case: str) -> None:
    if "flash-attn" not in available_backends():
        pytest.skip("needs flash-attn")
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in CASES[case].items()}
    place = {"dtype": torch.bfloat16, "device": "cuda"}
    paged = PagedKVCache(1, 3, 1024, KV_HEADS, 64, block_size=256, **place)
    plain = KVCache(1, 3, 1024, KV_HEADS, 64, **place)
    for lengths in ([300, 0, 700], [1, 5, 1], [1, 1, 1]):
        q = torch.randn(sum(lengths), HEADS, 64, **place)
        k, v = torch.randn(2, sum(lengths), KV_HEADS, 64, **place)
        cu_seqlens, outs = bounds(lengths).cuda(), []
        for cache in (paged, plain):
            outs.append(cache.layer(0).attend(q, k, v, cu_seqlens, max(lengths), **options))
            cache.advance(cu_seqlens)
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    assert why_not_in_place(torch.empty(1, HEADS, 64, **place), paged.keys[0], paged.values[0]) is None
