"""Ring attention: each rank keeps its queries and receives the keys and values of one rank after another.

https://arxiv.org/abs/2310.01889, with the zigzag layout: the pack is 2n chunks, and rank r holds chunks r and 2n-1-r.
In step s a rank attends to the keys of the rank s places before it, received straight from that rank. All queries of a
step come after all keys, so only the step over the rank's own keys needs a mask. A segment in two chunks contains
everything between them: its tokens are consecutive on each rank. So every step is one packed call, with boundaries
computed on the device without host synchronisation.

Shape legend: T' = T/n tokens of this rank, C = T'/2 tokens of a chunk, n ranks, Q query heads, K key-value heads,
D head size, D' size of a value head, S segments.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, distributed as dist
from torch.distributed import ProcessGroup

from parallel_layers.attention.backends import BACKENDS, choose_backend
from parallel_layers.attention.context_parallel.sequence_layout import boundaries_in, chunks_of
from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.attention.packed import (
    AttentionOptions,
    check_heads,
    check_segments,
    gradient_of_sinks,
    lse_with_sinks,
    out_with_sinks,
    packed_attention,
    widened,
)
from parallel_layers.distributed.collectives import all_to_all
from parallel_layers.kernels.merge import merge_attention
from parallel_layers.module.autocast import autocast_off, wide, without_autocast


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

    Forward: n-1 exchanges of keys and values, `[2, T/n, K, D]` from a later rank and half that size from an earlier
    rank, each overlapped with the previous step. Backward: n-1 exchanges of keys and values, and n-1 of their
    gradients. With a window shorter than the longest segment: one all-to-all each way, of the chunks within the window.

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
    scale, softcap, sinks = options.get("scale"), options.get("softcap"), options.get("sinks")
    head_dim, value_dim = q_TQD.shape[-1], v_TKD.shape[-1]
    check_heads(q_TQD, k_TKD, v_TKD, sinks)
    check_segments(q_TQD, k_TKD, v_TKD, Segments.of(cu_seqlens, max_seqlen), group.size())
    scoring = Scoring(True, options.get("window"), head_dim**-0.5 if scale is None else scale, softcap)
    if q_TQD.shape[0] % 2:
        raise ValueError(
            f"{q_TQD.shape[0]} tokens on a rank do not divide into two chunks; use split_sequence(..., layout='zigzag')"
        )
    if not len(q_TQD):  # every rank is without tokens
        return packed_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, **options)
    if scoring.window is not None and scoring.window < max_seqlen:
        return _halo_attention(q_TQD, k_TKD, v_TKD, cu_seqlens, max_seqlen, group, scoring.window, options)
    scoring = replace(scoring, window=None)
    size = max(head_dim, value_dim)  # keys and values travel as one tensor
    name = choose_backend(
        options.get("backend", "auto"), q_TQD.device.type, q_TQD.dtype, size, softcap is not None, True
    )
    kernel = BACKENDS[name].kernel
    kv = torch.stack((widened(k_TKD, size), widened(v_TKD, size)))
    steps = _steps(cu_seqlens, max_seqlen, q_TQD.shape[0], group)
    with autocast_off(q_TQD):  # as in `packed_attention`
        out: Tensor = _Ring.apply(widened(q_TQD, size), kv, sinks, steps, group, scoring, kernel)
    return out[..., :value_dim]


class _Step(NamedTuple):
    """A packed attention call: this rank's queries in `rows` attend to the received keys in `keys`."""

    rows: slice
    keys: slice
    segments: Segments
    causal: bool


def _needed_chunks(owner: int, rank: int) -> int:
    """Return how many chunks of rank `owner`, counted from its first chunk, have keys that rank `rank` needs."""
    return 1 if owner < rank else 2


def _steps(cu_seqlens: Tensor, max_seqlen: int, tokens: int, group: ProcessGroup) -> list[_Step]:
    """Return the packed calls of all steps; the first call is over the rank's own keys."""
    rank, size, chunk = group.rank(), group.size(), tokens // 2
    steps = []
    for owner in ((rank - step) % size for step in range(size)):
        begin = 1 if owner > rank else 0  # of this rank's chunks, only the second comes after a later rank's keys
        num_chunks = _needed_chunks(owner, rank)
        numbers = chunks_of(rank, size)[begin:], chunks_of(owner, size)[:num_chunks]
        cu_q, cu_k = (
            reduce(torch.add, [boundaries_in(cu_seqlens, n * chunk, chunk) for n in side]) for side in numbers
        )
        rows, keys = slice(begin * chunk, tokens), slice(0, num_chunks * chunk)
        segments = Segments(cu_q, cu_k, None, min(max_seqlen, rows.stop - rows.start), min(max_seqlen, keys.stop))
        steps.append(_Step(rows, keys, segments, causal=owner == rank))
    return steps


def _exchange(x: Tensor, to: int, source: int, rows: int, group: ProcessGroup) -> Callable[[], Tensor]:
    """Send to one rank and receive `[2, rows, K, D]` from another; return a function that waits for the latter."""
    message, received = x.contiguous(), x.new_empty(x.shape[0], rows, *x.shape[2:])
    send = dist.P2POp(dist.isend, message, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=source)
    in_flight = message, dist.batch_isend_irecv([send, receive])

    def wait() -> Tensor:
        for request in in_flight[1]:
            request.wait()
        return received

    return wait


def _fetch(kv: Tensor, step: int, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start to receive the keys and values of a step, and to send this rank's to the rank that needs them."""
    rank, size, chunk = group.rank(), group.size(), kv.shape[1] // 2
    to, owner = (rank + step) % size, (rank - step) % size
    return _exchange(kv[:, : _needed_chunks(rank, to) * chunk], to, owner, _needed_chunks(owner, rank) * chunk, group)


def _give_back(d_kv: Tensor, step: int, chunk: int, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start to send the gradients of a step's keys and values to their rank, and to receive this rank's."""
    rank, size = group.rank(), group.size()
    owner, seer = (rank - step) % size, (rank + step) % size
    return _exchange(d_kv, owner, seer, _needed_chunks(rank, seer) * chunk, group)


class _Ring(torch.autograd.Function):
    """The loops over the steps. `Kernel.backward` gets the merged output and log-sum-exp in each step."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        steps: list[_Step],
        group: ProcessGroup,
        scoring: Scoring,
        kernel: Kernel,
    ) -> Tensor:
        arrived, arriving = kv, _fetch(kv, 1, group)
        for i, step in enumerate(steps):
            k, v = arrived[:, step.keys]
            step_out, step_lse = kernel.forward(q[step.rows], k, v, step.segments, replace(scoring, causal=step.causal))
            if i == 0:
                out, lse = step_out.to(wide(q.dtype)).contiguous(), step_lse.contiguous()
            else:
                merge_attention(out[step.rows], lse[:, step.rows], step_out, step_lse)
            if i + 1 < len(steps):
                arrived = arriving()
            if i + 2 < len(steps):
                arriving = _fetch(kv, i + 2, group)
        without_sinks = out.to(q.dtype) if sinks is not None and ctx.needs_input_grad[2] else None
        if sinks is not None:
            out = out_with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, lse, without_sinks)
        ctx.steps, ctx.group, ctx.scoring, ctx.kernel = steps, group, scoring, kernel
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, lse, without_sinks = ctx.saved_tensors
        total = lse if sinks is None else lse_with_sinks(lse, sinks)
        steps: list[_Step] = ctx.steps
        arrived, arriving = kv, _fetch(kv, 1, ctx.group)
        returning: Callable[[], Tensor] | None = None
        for i, step in enumerate(steps):
            rows, rule = step.rows, replace(ctx.scoring, causal=step.causal)
            operands = q[rows], *arrived[:, step.keys], out[rows], total[:, rows].contiguous()
            d_q_part, *d_kv_parts = ctx.kernel.backward(d_out[rows], *operands, step.segments, rule)
            d_kv_part = torch.stack(d_kv_parts)
            if i == 0:
                d_q, d_kv = d_q_part.to(lse.dtype), d_kv_part.to(lse.dtype)
            else:
                d_q[rows] += d_q_part
            if returning is not None:
                _add_rows(d_kv, returning())
            if i + 1 < len(steps):
                arrived = arriving()
            if i > 0:
                returning = _give_back(d_kv_part, i, kv.shape[1] // 2, ctx.group)
            if i + 2 < len(steps):
                arriving = _fetch(kv, i + 2, ctx.group)
        assert returning is not None
        _add_rows(d_kv, returning())
        d_sinks = None if without_sinks is None else gradient_of_sinks(d_out, without_sinks, lse, sinks)
        return d_q.to(q.dtype), d_kv.to(kv.dtype), d_sinks, *(None,) * 4


def _add_rows(total: Tensor, rows: Tensor) -> None:
    """Add `rows` to the first tokens of `total [2, T', K, D]`, in place."""
    total[:, : rows.shape[1]] += rows


def _halo_attention(
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    group: ProcessGroup,
    window: int,
    options: AttentionOptions,
) -> Tensor:
    """Attend within `window` tokens: each chunk fetches the h = ceil((w - 1) / C) chunks before it.

    The fetched chunks and the chunk itself are consecutive keys that end with the queries, so every backend and every
    option of `packed_attention` works. One all-to-all of chunks `[C, K, D + D']`, and one of their gradients.
    """
    chunk = q_TQD.shape[0] // 2
    reach = -(-(window - 1) // chunk)
    chunks = _fetch_halo(torch.cat((k_TKD, v_TKD), dim=-1), reach, group)
    keys: list[Tensor] = []
    bounds_q, bounds_k = [], []
    for i, query_chunk in enumerate(chunks_of(group.rank(), group.size())):
        numbers = range(max(0, query_chunk - reach), query_chunk + 1)
        # An empty segment separates the segments of the two chunks.
        bounds_q.append(boundaries_in(cu_seqlens, query_chunk * chunk, chunk) + i * chunk)
        bounds_k.append(boundaries_in(cu_seqlens, numbers[0] * chunk, len(numbers) * chunk) + len(keys) * chunk)
        keys += [chunks[number] for number in numbers]
    k, v = torch.cat(keys).split([q_TQD.shape[2], v_TKD.shape[2]], dim=-1)
    halo_options: AttentionOptions = {
        **options,
        "cu_seqlens_k": torch.cat(bounds_k),
        "max_seqlen_k": min(max_seqlen, (reach + 1) * chunk),
    }
    return packed_attention(q_TQD, k, v, torch.cat(bounds_q), min(max_seqlen, chunk), **halo_options)


def _fetch_halo(x: Tensor, reach: int, group: ProcessGroup) -> dict[int, Tensor]:
    """Return this rank's chunks and the `reach` chunks before each, `[C, ...]`, by their numbers in the pack."""
    rank, size, chunk = group.rank(), group.size(), x.shape[0] // 2
    local_chunks = dict(zip(chunks_of(rank, size), x.chunk(2), strict=True))
    needs = [_missing(peer, size, reach) for peer in range(size)]
    if not any(needs):
        return local_chunks
    outgoing = [[number for number in needs[peer] if number in local_chunks] for peer in range(size)]
    arriving = [[number for number in needs[rank] if number in chunks_of(peer, size)] for peer in range(size)]
    going, coming = ([chunk * len(numbers) for numbers in side] for side in (outgoing, arriving))
    message = torch.cat([x[:0], *(local_chunks[number] for numbers in outgoing for number in numbers)])
    arrived = all_to_all(message, group, input_sizes=going, output_sizes=coming)
    order = [number for numbers in arriving for number in numbers]
    return local_chunks | {number: arrived[i * chunk : (i + 1) * chunk] for i, number in enumerate(order)}


def _missing(rank: int, size: int, reach: int) -> list[int]:
    """Return the chunks within a rank's windows that the rank does not hold."""
    chunks = chunks_of(rank, size)
    return sorted({number for chunk in chunks for number in range(max(0, chunk - reach), chunk)} - set(chunks))
