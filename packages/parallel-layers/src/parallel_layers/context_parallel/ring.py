"""Ring attention: keys and values travel around the ranks while every rank keeps its queries.

https://arxiv.org/abs/2310.01889, with the zigzag layout that gives every rank the same share of a causal mask.

The pack is 2n chunks; rank r holds chunks r and 2n-1-r. Segments may cross any chunk. Between two different chunks at
most one segment is shared, the one that runs through the later chunk's first token: its queries are a prefix of that
chunk and, because it covers everything in between, its keys are a suffix of what another rank holds before it. So every
piece of work is one packed call with boundaries computed on the device, and no host synchronisation is needed.

Shape legend: T' = T/n tokens of this rank, C = T'/2 tokens of a chunk, n ranks, Q query heads, K key-value heads,
D head size, S segments.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel_layers.attention.backends import BACKENDS, choose_backend
from parallel_layers.attention.packed import AttentionOptions, check_heads, check_segments, packed_attention, widened
from parallel_layers.attention.problem import Forward, Kernel, Scoring, Segments
from parallel_layers.attention.sinks import gradient_of_sinks, lse_with_sinks, out_with_sinks
from parallel_layers.autocast import without_autocast
from parallel_layers.context_parallel.halo import halo_attention


def ring_attention(
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: ProcessGroup | None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Causal `packed_attention` over tokens that are sharded in the zigzag layout of `split_sequence`.

    Forward: n-1 exchanges of `[2, T/n, K, D]` with the neighbours, each behind the products of the step before.
    Backward: n-1 of the same, and n of their gradients in fp32. With a window shorter than the longest segment nothing
    travels around: see `parallel_layers.context_parallel.halo`.

    Args:
        q_TQD: `[T/n, Q, D]`, after rotation by the tokens' own positions.
        k_TKD: `[T/n, K, D]`.
        v_TKD: `[T/n, K, D']`.
        cu_seqlens: `[S+1]` int32 boundaries in the whole pack, from 0 to its end. Tokens behind the last one belong to
            no segment, and what they get is not defined.
        max_seqlen: At least the longest segment.
        group: The context-parallel group; None or one rank: plain `packed_attention`.
        **options: `window`, `scale`, `softcap`, `sinks`, `backend` of `packed_attention`; without a window the backend
            must give a log-sum-exp. The gradient of `sinks [Q]` is this rank's share: that of its tokens.

    Returns:
        `[T/n, Q, D']`.

    Raises:
        ValueError: No causal mask, or other keys than the queries' (use `ulysses_attention`); an odd number of tokens;
            what `packed_attention` raises. Before anything is sent.
    """
    if group is None or group.size() == 1:
        return packed_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, **options)
    other_keys = any(options.get(name) is not None for name in ("cu_seqlens_k", "max_seqlen_k", "used_k"))
    if not options.get("causal", True) or other_keys:
        raise ValueError(
            f"ring_attention is causal, over the queries' own keys, got {sorted(options)}; use ulysses_attention, "
            "which takes every option"
        )
    # All of it before the first rank sends: the others would wait.
    check_heads(q_TQD, k_TKD, v_TKD, options.get("sinks"))
    check_segments(q_TQD, k_TKD, v_TKD, cu_seqlens, options.get("window"))
    if q_TQD.shape[0] % 2:
        raise ValueError(
            f"{q_TQD.shape[0]} tokens of a rank are not two chunks; use split_sequence(..., layout='zigzag')"
        )
    if not len(q_TQD):  # nor has another rank a token
        return packed_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, **options)
    window = options.get("window")
    if window is not None and window < max_seqlen:
        return halo_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, group, window, options)
    head_dim, value_dim = q_TQD.shape[2], v_TKD.shape[2]
    scale, softcap, sinks = options.get("scale"), options.get("softcap"), options.get("sinks")
    scoring = Scoring(True, None, head_dim**-0.5 if scale is None else scale, softcap)
    size = max(head_dim, value_dim)  # keys and values travel as one tensor
    name = choose_backend(
        options.get("backend", "auto"), q_TQD.device.type, q_TQD.dtype, size, softcap is not None, True
    )
    kernel = BACKENDS[name].kernel
    kv = torch.stack((widened(k_TKD, size), widened(v_TKD, size)))
    with torch.autocast(q_TQD.device.type, enabled=False):  # as `packed_attention`
        out: Tensor = _Ring.apply(widened(q_TQD, size), kv, sinks, cu_seqlens, max_seqlen, group, scoring, kernel)
    return out[..., :value_dim]


class _Piece(NamedTuple):
    """One packed call: this rank's queries in `rows`, the travelling keys in `keys`."""

    rows: slice
    keys: slice
    segments: Segments
    causal: bool


class _Plan:
    """The pieces of every step of the ring."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, tokens: int, group: ProcessGroup) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen
        self.rank, self.size, self.chunk = group.rank(), group.size(), tokens // 2

    def pieces(self, owner: int) -> Iterator[_Piece]:
        """What this rank computes with the keys of rank `owner`."""
        chunk, late = self.chunk, 2 * self.size - 1 - self.rank
        first, second, both = slice(0, chunk), slice(chunk, 2 * chunk), slice(0, 2 * chunk)
        if owner == self.rank:
            bounds = torch.cat((self._inside(self.rank), self._inside(late) + chunk))
            longest = min(self.max_seqlen, chunk)
            yield _Piece(both, both, Segments(bounds, bounds, None, longest, longest), causal=True)
        if owner < self.rank:
            yield _Piece(first, first, self._shared(self.rank, [owner]), causal=False)
        if owner <= self.rank:
            yield _Piece(second, first, self._shared(late, [owner]), causal=False)
        else:
            yield _Piece(second, both, self._shared(late, [owner, 2 * self.size - 1 - owner]), causal=False)

    def _inside(self, chunk: int) -> Tensor:
        """Boundaries of the segments' parts in a chunk, from its first token."""
        return self.cu_seqlens.clamp(chunk * self.chunk, (chunk + 1) * self.chunk) - chunk * self.chunk

    def _shared(self, later: int, earlier: list[int]) -> Segments:
        """The segment at the first token of chunk `later`, with its keys in the chunks `earlier`, laid end to end.

        The queries and keys that are not of this segment form two more segments: one without queries before it, one
        without keys after it. Where the segments have ended before, the first and the last are all there is.
        """
        start = later * self.chunk
        at = torch.searchsorted(self.cu_seqlens[:-1], self.cu_seqlens.new_full((1,), start), right=True)
        begin, end = self.cu_seqlens[at - 1], self.cu_seqlens[at]
        queries = end.clamp(start, start + self.chunk) - start
        skipped = sum((begin - c * self.chunk).clamp(0, self.chunk) for c in earlier)
        assert isinstance(skipped, Tensor)
        total = len(earlier) * self.chunk
        zero = torch.zeros_like(queries)
        cu_q = torch.cat((zero, zero, queries, zero + self.chunk))
        cu_k = torch.cat((zero, skipped, zero + total, zero + total))
        return Segments(cu_q, cu_k, None, self.chunk, total)


class _Exchange:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent, self._received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self._requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """What has arrived."""
        for request in self._requests:
            request.wait()
        return self._received


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take another set of keys into (out `[T, Q, D]`, lse `[Q, T]`), in place."""
    total = torch.logaddexp(lse, part_lse)
    # No keys on either side: -inf minus -inf.
    old, new = (torch.exp(x - total).nan_to_num_(0.0).T[..., None] for x in (lse, part_lse))
    out.mul_(old).add_(part.to(out.dtype) * new)
    lse.copy_(total)


class _Ring(torch.autograd.Function):
    """The two loops around the ring; `Kernel.backward` needs only the merged output and log-sum-exp for each part."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        group: ProcessGroup,
        scoring: Scoring,
        kernel: Kernel,
    ) -> Tensor:
        plan = _Plan(cu_seqlens, max_seqlen, q.shape[0], group)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=wide)
        travelling = kv
        for step in range(group.size()):
            exchange = _Exchange(travelling, group) if step + 1 < group.size() else None
            for piece in plan.pieces((group.rank() - step) % group.size()):
                k, v = travelling[:, piece.keys]
                rule = replace(scoring, causal=piece.causal)
                part, part_lse = kernel.forward(q[piece.rows], k, v, piece.segments, rule)
                _merge(out[piece.rows], lse[:, piece.rows], part, part_lse)
            if exchange is not None:
                travelling = exchange.wait()
        without_sinks = out.to(q.dtype) if sinks is not None and ctx.needs_input_grad[2] else None
        if sinks is not None:
            out = out_with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, lse, without_sinks)
        ctx.plan, ctx.group, ctx.scoring, ctx.kernel = plan, group, scoring, kernel
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, lse, without_sinks = ctx.saved_tensors
        total = lse if sinks is None else lse_with_sinks(lse, sinks)
        group, size = ctx.group, ctx.group.size()
        d_q = torch.zeros_like(q, dtype=lse.dtype)
        travelling, returning = kv, None
        for step in range(size):
            exchange = _Exchange(travelling, group) if step + 1 < size else None
            d_kv = torch.zeros_like(kv, dtype=lse.dtype)
            for piece in ctx.plan.pieces((group.rank() - step) % size):
                k, v = travelling[:, piece.keys]
                done = Forward(q[piece.rows], k, v, out[piece.rows], total[:, piece.rows].contiguous())
                rule = replace(ctx.scoring, causal=piece.causal)
                d_q_part, *d_kv_parts = ctx.kernel.backward(d_out[piece.rows], done, piece.segments, rule)
                d_q[piece.rows] += d_q_part
                for d_x, d_x_part in zip(d_kv[:, piece.keys], d_kv_parts, strict=True):
                    d_x += d_x_part
            if returning is not None:  # the gradients of these keys, from the ranks that had them before
                d_kv += returning.wait()
            returning = _Exchange(d_kv, group)
            if exchange is not None:
                travelling = exchange.wait()
        assert returning is not None
        d_sinks = None if without_sinks is None else gradient_of_sinks(d_out, without_sinks, lse, sinks)
        return d_q.to(q.dtype), returning.wait().to(kv.dtype), d_sinks, *(None,) * 5
