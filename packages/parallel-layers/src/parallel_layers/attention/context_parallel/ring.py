"""Ring attention: each rank keeps its queries and receives the keys and values of one rank after another.

https://arxiv.org/abs/2310.01889, with the zigzag layout that gives every rank the same share of a causal mask. In step
s a rank attends to the keys of the rank s places before it. Keys and values go straight to the ranks that need them,
and their gradients straight back; nothing is relayed.

The pack is 2n chunks; rank r holds chunks r and 2n-1-r. Two different chunks share at most one segment: the segment at
the later chunk's first token. Its queries are a prefix of the later chunk, and its keys are a suffix of the other
rank's earlier tokens. So every step is one packed call with boundaries computed on the device, without host
synchronisation.

Shape legend: T' = T/n tokens of this rank, C = T'/2 tokens of a chunk, n ranks, Q query heads, K key-value heads,
D head size, S segments.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel_layers.attention.backends import BACKENDS, choose_backend
from parallel_layers.attention.context_parallel.window import halo_attention
from parallel_layers.attention.kernel_interface import Forward, Kernel, Scoring, Segments
from parallel_layers.attention.packed import (
    AttentionOptions,
    check_heads,
    check_longest,
    check_segments,
    packed_attention,
    widened,
)
from parallel_layers.attention.sinks import gradient_of_sinks, lse_with_sinks, out_with_sinks
from parallel_layers.autocast import without_autocast
from parallel_layers.kernels.merge import merge_attention


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
    """Causal `packed_attention` over tokens sharded in the zigzag layout of `split_sequence`.

    Forward: n-1 exchanges of keys and values, `[2, T/n, K, D]` from a later rank and half of that from an earlier rank,
    each overlapped with the previous step. Backward: n-1 exchanges of keys and values, and n-1 of their gradients. A
    window shorter than the longest segment sends only the chunks within the window; see `window`.

    Args:
        q_TQD: `[T/n, Q, D]`, rotated by the tokens' positions.
        k_TKD: `[T/n, K, D]`, rotated.
        v_TKD: `[T/n, K, D']`.
        cu_seqlens: `[S+1]` int32 boundaries in the whole pack, starting at 0. The outputs of tokens after the last
            boundary are undefined.
        max_seqlen: Upper bound of a segment's length.
        group: The context-parallel group; None or one rank: plain `packed_attention`.
        **options: `window`, `scale`, `softcap`, `sinks`, `backend` of `packed_attention`. Without a window the backend
            must return a log-sum-exp. The gradient of `sinks [Q]` is the share of this rank's tokens.

    Returns:
        `[T/n, Q, D']`.

    Raises:
        ValueError: The options have no causal mask or separate keys (use `ulysses_attention`), the number of tokens is
            odd, or `packed_attention` raises. All checks precede the first exchange.
    """
    if group is None or group.size() == 1:
        return packed_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, **options)
    other_keys = any(options.get(name) is not None for name in ("cu_seqlens_k", "max_seqlen_k", "used_k"))
    if not options.get("causal", True) or other_keys:
        raise ValueError(
            f"ring_attention supports only causal self-attention, got the options {sorted(options)}; use "
            "ulysses_attention, which takes every option"
        )
    # Check before the first exchange: if one rank raised later, the others would wait.
    check_heads(q_TQD, k_TKD, v_TKD, options.get("sinks"))
    check_segments(q_TQD, k_TKD, v_TKD, cu_seqlens, options.get("window"))
    check_longest(Segments(cu_seqlens, cu_seqlens, None, max_seqlen, max_seqlen))
    if q_TQD.shape[0] % 2:
        raise ValueError(
            f"{q_TQD.shape[0]} tokens on a rank do not divide into two chunks; use split_sequence(..., layout='zigzag')"
        )
    if not len(q_TQD):  # every rank is without tokens
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
    with torch.autocast(q_TQD.device.type, enabled=False):  # as in `packed_attention`
        out: Tensor = _Ring.apply(widened(q_TQD, size), kv, sinks, cu_seqlens, max_seqlen, group, scoring, kernel)
    return out[..., :value_dim]


class _Step(NamedTuple):
    """One packed call: this rank's queries in `rows` attend to the received keys in `keys`."""

    rows: slice
    keys: slice
    segments: Segments
    causal: bool


class _Plan:
    """The packed calls of all steps on one rank; the first step is over its own keys."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, tokens: int, group: ProcessGroup) -> None:
        self.cu_seqlens, self.max_seqlen, self.group = cu_seqlens, max_seqlen, group
        self.rank, self.size, self.chunk = group.rank(), group.size(), tokens // 2
        self.late = 2 * self.size - 1 - self.rank
        self._segments = {chunk: self._segment_at(chunk) for chunk in (self.rank, self.late)}
        self.steps = [self._step((self.rank - step) % self.size) for step in range(self.size)]

    def seen(self, owner: int, rank: int) -> slice:
        """Return the tokens of rank `owner` whose keys rank `rank` needs: the first chunk, or both chunks."""
        return slice(0, self.chunk if owner < rank else 2 * self.chunk)

    def _step(self, owner: int) -> _Step:
        """Return the packed call over the keys of rank `owner`."""
        first, second, both = slice(0, self.chunk), slice(self.chunk, 2 * self.chunk), slice(0, 2 * self.chunk)
        if owner == self.rank:
            return _Step(both, both, self._own(), causal=True)
        if owner < self.rank:
            return _Step(both, first, self._earlier(owner), causal=False)
        return _Step(second, both, self._later(owner), causal=False)

    def _own(self) -> Segments:
        """Return the segments of the two chunks end to end; a segment that spans both chunks is one segment."""
        first, second = self._inside(self.rank), self._inside(self.late) + self.chunk
        begin, end = self._segments[self.late]
        start = (begin - self.rank * self.chunk).clamp(max=self.chunk)
        start = torch.where(end > self.late * self.chunk, start, self.chunk)  # otherwise the segment ended before
        bounds = torch.cat((first, second))
        bounds = torch.where(bounds == self.chunk, start.clamp(min=0), bounds)
        longest = min(self.max_seqlen, 2 * self.chunk)
        return Segments(bounds, bounds, None, longest, longest)

    def _earlier(self, owner: int) -> Segments:
        """Return the segments of both chunks' queries over the first chunk of an earlier rank.

        A segment that reaches from the second chunk to the earlier rank contains the whole first chunk, so its queries
        are a prefix of both chunks together.
        """
        reaches = self._segments[self.late][0] < (owner + 1) * self.chunk
        queries = self._prefix(self.rank) + torch.where(reaches, self._prefix(self.late), 0)
        return self._shared(queries, 2 * self.chunk, self.rank, [owner])

    def _later(self, owner: int) -> Segments:
        """Return the segments of the second chunk's queries over both chunks of a later rank, end to end."""
        return self._shared(self._prefix(self.late), self.chunk, self.late, [owner, 2 * self.size - 1 - owner])

    def _inside(self, chunk: int) -> Tensor:
        """Return the segments' boundaries in a chunk, counted from its first token."""
        return self.cu_seqlens.clamp(chunk * self.chunk, (chunk + 1) * self.chunk) - chunk * self.chunk

    def _segment_at(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return the boundaries of the segment at a chunk's first token; of the last segment if all ended before."""
        start = self.cu_seqlens.new_full((1,), chunk * self.chunk)
        at = torch.searchsorted(self.cu_seqlens[:-1], start, right=True)
        return self.cu_seqlens[at - 1], self.cu_seqlens[at]

    def _prefix(self, chunk: int) -> Tensor:
        """Return the number of tokens of a chunk in the segment of its first token."""
        start = chunk * self.chunk
        return self._segments[chunk][1].clamp(start, start + self.chunk) - start

    def _shared(self, queries: Tensor, rows: int, later: int, earlier: list[int]) -> Segments:
        """Return the segment at the first token of chunk `later`: `queries` of `rows` queries, keys in `earlier`.

        Two more segments hold the rest: earlier keys without queries, and later queries without keys. If all segments
        ended before, the middle segment is empty.
        """
        begin, _ = self._segments[later]
        skipped = sum((begin - c * self.chunk).clamp(0, self.chunk) for c in earlier)
        assert isinstance(skipped, Tensor)
        total = len(earlier) * self.chunk
        zero = torch.zeros_like(queries)
        cu_q = torch.cat((zero, zero, queries, zero + rows))
        cu_k = torch.cat((zero, skipped, zero + total, zero + total))
        return Segments(cu_q, cu_k, None, rows, total)


class _Exchange:
    """A send to one rank and a receive of `[2, rows, K, D]` from another rank, in flight."""

    def __init__(self, x: Tensor, to: int, source: int, rows: int, group: ProcessGroup) -> None:
        self._sent, self._received = x.contiguous(), x.new_empty(x.shape[0], rows, *x.shape[2:])
        self._requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=to),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=source),
            ]
        )

    def wait(self) -> Tensor:
        """Wait, and return the received tensor."""
        for request in self._requests:
            request.wait()
        return self._received


def _fetch(plan: _Plan, kv: Tensor, step: int) -> _Exchange:
    """Start to receive the keys and values of a step, and to send this rank's to the rank that needs them."""
    rank, size = plan.rank, plan.size
    to, owner = (rank + step) % size, (rank - step) % size
    return _Exchange(kv[:, plan.seen(rank, to)], to, owner, plan.seen(owner, rank).stop, plan.group)


def _give_back(plan: _Plan, d_kv: Tensor, step: int) -> _Exchange:
    """Start to send the gradients of a step's keys and values to their rank, and to receive this rank's."""
    rank, size = plan.rank, plan.size
    owner, seer = (rank - step) % size, (rank + step) % size
    return _Exchange(d_kv, owner, seer, plan.seen(rank, seer).stop, plan.group)


class _Ring(torch.autograd.Function):
    """The loops over the steps. `Kernel.backward` gets the merged output and log-sum-exp in each step."""

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
        seen, arriving = kv, _fetch(plan, kv, 1)
        for step, work in enumerate(plan.steps):
            k, v = seen[:, work.keys]
            part, part_lse = kernel.forward(q[work.rows], k, v, work.segments, replace(scoring, causal=work.causal))
            if step == 0:
                wide = torch.promote_types(q.dtype, torch.float32)
                out, lse = part.to(wide).contiguous(), part_lse.contiguous()
            else:
                merge_attention(out[work.rows], lse[:, work.rows], part, part_lse)
            if step + 1 < plan.size:
                seen = arriving.wait()
            if step + 2 < plan.size:
                arriving = _fetch(plan, kv, step + 2)
        without_sinks = out.to(q.dtype) if sinks is not None and ctx.needs_input_grad[2] else None
        if sinks is not None:
            out = out_with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, lse, without_sinks)
        ctx.plan, ctx.scoring, ctx.kernel = plan, scoring, kernel
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, lse, without_sinks = ctx.saved_tensors
        total = lse if sinks is None else lse_with_sinks(lse, sinks)
        plan: _Plan = ctx.plan
        seen, arriving = kv, _fetch(plan, kv, 1)
        returning: _Exchange | None = None
        for step, work in enumerate(plan.steps):
            k, v = seen[:, work.keys]
            done = Forward(q[work.rows], k, v, out[work.rows], total[:, work.rows].contiguous())
            rule = replace(ctx.scoring, causal=work.causal)
            d_q_part, *d_kv_parts = ctx.kernel.backward(d_out[work.rows], done, work.segments, rule)
            d_kv_part = torch.stack(d_kv_parts)
            if step == 0:
                d_q, d_kv = d_q_part.to(lse.dtype), d_kv_part.to(lse.dtype)
            else:
                d_q[work.rows] += d_q_part
            if returning is not None:
                _add_rows(d_kv, returning.wait())
            if step + 1 < plan.size:
                seen = arriving.wait()
            if step > 0:
                returning = _give_back(plan, d_kv_part, step)
            if step + 2 < plan.size:
                arriving = _fetch(plan, kv, step + 2)
        assert returning is not None
        _add_rows(d_kv, returning.wait())
        d_sinks = None if without_sinks is None else gradient_of_sinks(d_out, without_sinks, lse, sinks)
        return d_q.to(q.dtype), d_kv.to(kv.dtype), d_sinks, *(None,) * 5


def _add_rows(total: Tensor, part: Tensor) -> None:
    """Add `part` to the first tokens of `total [2, T', K, D]`, in place."""
    total[:, : part.shape[1]] += part
