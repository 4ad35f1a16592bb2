"""`packed_attention`: attention over packed sequences on any backend.

Shape legend: T tokens, Q query heads, K key-value heads, D head size, S segments.
"""

import math
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.attention.backends import BACKENDS, choose_backend
from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.attention.sdpa import sdpa_attention
from parallel_layers.data.boundaries import check_boundaries, host_reads
from parallel_layers.kernels.exact import in_double
from parallel_layers.module.autocast import autocast_off, wide, without_autocast


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `packed_attention`."""

    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_k: int | None
    used_k: Tensor | None
    backend: str


def packed_attention(
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    used_k: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax attention inside each segment of a packed batch.

    For query i and key j of one segment (n_q queries, n_k keys; query i is at place a = i + n_k - n_q):

        s_ij = scale · q_i · k_j,  then softcap · tanh(s_ij / softcap) with a soft-cap,
               -inf for j > a (causal) and for |a - j| >= window
        out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink))          (the sink's term only with `sinks`)

    Query head h reads key-value head h // (Q / K). Segments can have length zero. The output of a query without keys is
    zero. No communication. Only the backend "reference" synchronises with the host.

    Args:
        q_TQD: `[T, Q, D]`.
        k_TKD: `[T, K, D]`, K divides Q.
        v_TKD: `[T, K, D']`.
        cu_seqlens: `[S+1]` int32 boundaries of the segments, on the tensors' device. They rise from 0 to at most T; the
            outputs of tokens behind the last one are undefined. Values are checked on the CPU alone: on a GPU wrong
            boundaries give wrong numbers, read outside of the tensors, or end by an assertion on the device.
        max_seqlen: Upper bound of a segment's length.
        causal: Mask later keys.
        window: Sliding window in tokens, including the query's own token (Hugging Face's `sliding_window`).
        scale: Factor of the scores (default: 1/sqrt(D)).
        softcap: Soft-cap of the scores (Gemma 2).
        sinks: `[Q]`, one learned score per head in the softmax's denominator (gpt-oss).
        cu_seqlens_k: Boundaries among the keys (default: `cu_seqlens`).
        max_seqlen_k: Upper bound of a segment's keys (default: `max_seqlen`).
        used_k: `[S]` int32, the number of valid keys at the start of each segment (a cache). Inference only.
        backend: A name of `available_backends()`, or "auto": the fastest installed backend that supports the call.
            "invariant": the fastest backend whose bits do not depend on the rest of the pack.

    Returns:
        `[T, Q, D']` in q's dtype.

    Raises:
        ValueError: Shapes or dtypes disagree, boundaries on the CPU do not fit the tokens or `max_seqlen`, or the
            backend is unknown, not installed or does not support the call.
    """
    segments = Segments.of(cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k, used_k)
    check_heads(q_TQD, k_TKD, v_TKD, sinks)
    check_segments(q_TQD, k_TKD, v_TKD, segments)
    head_dim, value_dim = q_TQD.shape[-1], v_TKD.shape[-1]
    scoring = Scoring(causal, window, head_dim**-0.5 if scale is None else scale, softcap)
    size = max(head_dim, value_dim)
    # Kernels of pairs of sizes share no key-value heads.
    sizes = (size, size) if q_TQD.shape[1] != k_TKD.shape[1] else (head_dim, value_dim)
    needs = sizes[0], softcap is not None, sinks is not None, sizes[1]
    name = choose_backend(backend, q_TQD.device.type, q_TQD.dtype, *needs)
    # In a plan the operator stands for "sdpa", too: the meta device has no kernel without the scores of all tokens.
    if BACKENDS[name].kernel is None and not q_TQD.is_meta:
        with autocast_off(q_TQD):  # as in the operator of the kernels
            return sdpa_attention(q_TQD, k_TKD, v_TKD, segments, scoring)
    if name not in ("reference", "sdpa") and sizes not in BACKENDS[name].pairs:  # other kernels need one size
        q_TQD, k_TKD, v_TKD = (widened(x, size) for x in (q_TQD, k_TKD, v_TKD))
    out, _, _ = _attention(q_TQD, k_TKD, v_TKD, sinks, *segments, causal, window, scoring.scale, softcap, name)
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def widened(x: Tensor, size: int) -> Tensor:
    """Pad heads with zeros, `[T, heads, D]` -> `[T, heads, size]`; scores and outputs stay the same."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def check_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError if shapes or dtypes of queries, keys, values and sinks disagree."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"packed_attention takes q [T, Q, D], k [T, K, D], v [T, K, D'], got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key-value heads evenly ({shapes})")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks {tuple(sinks.shape)} must hold one score for each of the {q.shape[1]} query heads")


def check_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments, ranks: int = 1) -> None:
    """Raise ValueError for segments that do not fit queries and keys; `ranks` hold as many tokens each.

    Values are checked on the CPU alone, see `check_boundaries`.
    """
    cu_q, cu_k, used_k, *_ = segments
    if cu_k is cu_q and len(q) != len(k):
        raise ValueError(f"{len(q)} queries but {len(k)} keys; pass cu_seqlens_k when they differ")
    check_boundaries(cu_q, len(q) * ranks, segments.max_q, covers=False)
    limit = segments.max_k if used_k is None else None
    check_boundaries(cu_k, len(k) * ranks, limit, name="cu_seqlens_k", covers=False)
    num_segments = len(cu_q) - 1
    if len(cu_k) - 1 != num_segments:
        raise ValueError(
            f"cu_seqlens_k has {len(cu_k) - 1} segments and cu_seqlens {num_segments}; give a segment without keys a "
            "length of 0"
        )
    if used_k is None:
        return
    if used_k.dim() != 1 or used_k.dtype != torch.int32:
        raise ValueError(f"used_k must be 1-D int32, got {tuple(used_k.shape)} {used_k.dtype}; use used_k.int()")
    if len(used_k) != num_segments:
        raise ValueError(f"used_k has {len(used_k)} entries for {num_segments} segments of cu_seqlens; give one each")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("used_k is for inference; call under torch.no_grad(), or pack the keys that exist")
    if host_reads(used_k):
        used, most = used_k.tolist(), cu_k.diff().clamp(max=segments.max_k).tolist()
        if any(not 0 <= count <= limit for count, limit in zip(used, most, strict=True)):
            raise ValueError(
                f"used_k {used!s:.100} must be in 0..{most!s:.100}, the keys of each segment up to max_seqlen_k="
                f"{segments.max_k}"
            )


# Attention sinks. Kernels compute attention without sinks. With the kernel's output o and log-sum-exp L over the keys,
# and the keys' share w = sigmoid(L - sink) of the softmax:
#
#     out = w o,   log-sum-exp = log(e^L + e^sink),   d_sink = -sum_t w_t (1 - w_t) (o_t · d_out_t)
#
# Terms of both signs cancel in d_sink, so the sum uses o, which is rounded once, instead of `out`, which is rounded
# twice. If the sinks need a gradient, o `[T, Q, D]` is saved for the backward, too.
def lse_with_sinks(lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """Return the log-sum-exp of the whole softmax, `[Q, T]`."""
    return torch.logaddexp(lse_QT, sinks_Q.to(lse_QT.dtype)[:, None])


def out_with_sinks(out_TQD: Tensor, lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """Return the output of the whole softmax, `[T, Q, D]`, in the wider of the two dtypes."""
    share_QT = in_double(torch.sigmoid, lse_QT - sinks_Q.to(lse_QT.dtype)[:, None])
    return out_TQD * share_QT.T[..., None]


def gradient_of_sinks(d_out_TQD: Tensor, out_TQD: Tensor, lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """Return the sinks' gradient `[Q]` from the output's gradient and the kernel's output and log-sum-exp."""
    margin_QT = lse_QT - sinks_Q.to(lse_QT.dtype)[:, None]
    products_QT = (out_TQD.to(lse_QT.dtype) * d_out_TQD).sum(-1).T
    return -(torch.sigmoid(margin_QT) * torch.sigmoid(-margin_QT) * products_QT).sum(-1).to(sinks_Q.dtype)


# One operator for all kernels, opaque to torch.compile. Kernels choose the dtypes of their GEMMs, so it runs without
# autocast. Returns the output, the kernel's log-sum-exp and, with sinks, the kernel's own output.
@torch.library.custom_op("parallel_layers::packed_attention", mutates_args=())
@without_autocast
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    used_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if len(q) and len(k):
        segments = Segments(cu_q, cu_k, used_k, max_q, max_k)
        kernel = cast(Kernel, BACKENDS[backend].kernel)
        out, lse = kernel.forward(q, k, v, segments, Scoring(causal, window, scale, softcap))
    else:  # not every kernel takes empty tensors
        out, lse, _ = _outputs(q, k, v, None)
        out, lse = out.zero_(), lse.fill_(-math.inf)
    if sinks is None:
        return out, lse, q.new_empty(0)
    return out_with_sinks(out, lse, sinks).to(out.dtype), lse, out


def _outputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the output `[T, Q, D']`, the log-sum-exp `[Q, T]`, and with sinks the kernel's output (else empty)."""
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=wide(q.dtype))
    return out, lse, q.new_empty(0 if sinks is None else out.shape)


@torch.library.custom_op("parallel_layers::packed_attention_backward", mutates_args=())
@without_autocast
def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if not (len(q) and len(k)):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    kernel = BACKENDS[backend].kernel
    if q.is_meta:
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        if kernel is not None:
            kernel.workspace(q, k, v)
        return gradients
    segments, scoring = Segments(cu_q, cu_k, None, max_q, max_k), Scoring(causal, window, scale, softcap)
    return cast(Kernel, kernel).backward(d_out, q, k, v, out, lse, segments, scoring)


@_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *further: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_q, cu_k, _, *ctx.options = inputs
    out, lse, without_sinks = output
    ctx.mark_non_differentiable(lse, without_sinks)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, cu_q, cu_k, out, lse, without_sinks if ctx.needs_input_grad[3] else None)


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Compute the gradients. With sinks the kernel gets `out` and `total` of the whole softmax."""
    if d_out is None:
        return (None,) * 14
    q, k, v, sinks, cu_q, cu_k, out, lse, without_sinks = ctx.saved_tensors
    total = lse if sinks is None else lse_with_sinks(lse, sinks)
    d_q, d_k, d_v = _attention_backward(d_out, q, k, v, out, total, cu_q, cu_k, *ctx.options)
    d_sinks = None if without_sinks is None else gradient_of_sinks(d_out, without_sinks, lse, sinks)
    return d_q, d_k, d_v, d_sinks, *(None,) * 10


_attention.register_fake(_outputs)
_attention.register_autograd(_backward, setup_context=_setup_context)
