"""The flash kernels as `Kernel`s: FlashAttention-4, flash-attn 2, and torch's own FlashAttention-2.

Each adapter calls the library's raw forward and backward, so that callers can pass a merged output and log-sum-exp to
the backward. The libraries are optional extras and imported at the first call.

Shape legend: T tokens, Q query heads, K key-value heads, D head size.
"""

import math

import torch
from torch import Tensor

from parallel_layers.attention.kernel_interface import Forward, Scoring, Segments


def _empty_as(lse: Tensor, value: float) -> Tensor:
    """Set the log-sum-exp of queries without keys to `value`. FlashAttention-2 uses +inf, `Kernel` -inf."""
    return lse.nan_to_num(nan=math.nan, posinf=value, neginf=value)


class VarlenKernel:
    """The ATen operators behind `torch.nn.attention.varlen.varlen_attn`.

    The backward of `varlen_attn` does not accept a merged output and log-sum-exp, and its signature changes between
    releases. The two ATen operators are the same in torch 2.11 to 2.13.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        left, right = scoring.flash_window
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *segments.bounds,
            0.0,
            scoring.causal and scoring.window is None,
            False,
            scale=scoring.scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=segments.used_k,
        )
        return out, _empty_as(lse, -math.inf)

    def backward(
        self, d_out: Tensor, done: Forward, segments: Segments, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        left, right = scoring.flash_window
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=done.q.device)
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            d_out.contiguous(),
            done.q,
            done.k,
            done.v,
            done.out,
            _empty_as(done.lse, math.inf),
            *segments.bounds,
            0.0,
            scoring.causal and scoring.window is None,
            no_dropout,
            torch.empty(0, device=done.q.device),
            scale=scoring.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return d_q, d_k, d_v


class FlashAttention2Kernel:
    """The `flash-attn` package, version 2."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # an optional extra

        left, right = scoring.flash_window
        out, lse, *_ = _flash_attn_varlen_forward(
            q,
            k,
            v,
            *segments.bounds,
            dropout_p=0.0,
            softmax_scale=scoring.scale,
            causal=scoring.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=scoring.softcap or 0.0,
            seqused_k=segments.used_k,
        )
        return out, _empty_as(lse, -math.inf)

    def backward(
        self, d_out: Tensor, done: Forward, segments: Segments, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # an optional extra

        left, right = scoring.flash_window
        d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (done.q, done.k, done.v))
        _flash_attn_varlen_backward(
            d_out,
            done.q,
            done.k,
            done.v,
            done.out,
            _empty_as(done.lse, math.inf),
            d_q,
            d_k,
            d_v,
            *segments.bounds,
            dropout_p=0.0,
            softmax_scale=scoring.scale,
            causal=scoring.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=scoring.softcap or 0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return d_q, d_k, d_v


class FlashAttention4Kernel:
    """The `flash-attn-4` package: kernels in the CuTe language for Hopper and Blackwell, compiled at the first call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        from flash_attn.cute.interface import _flash_attn_fwd  # an optional extra

        left, right = (None if side < 0 else side for side in scoring.flash_window)
        out, lse, *_ = _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=segments.cu_q,
            cu_seqlens_k=segments.cu_k,
            seqused_k=segments.used_k,
            max_seqlen_q=segments.max_q,
            max_seqlen_k=segments.max_k,
            softmax_scale=scoring.scale,
            causal=scoring.causal,
            softcap=scoring.softcap,
            window_size_left=left,
            window_size_right=right,
            return_lse=True,
        )
        return out, _empty_as(lse, -math.inf)

    def backward(
        self, d_out: Tensor, done: Forward, segments: Segments, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        from flash_attn.cute.interface import _flash_attn_bwd  # an optional extra

        left, right = (None if side < 0 else side for side in scoring.flash_window)
        d_q, d_k, d_v = _flash_attn_bwd(
            done.q,
            done.k,
            done.v,
            done.out,
            d_out,
            _empty_as(done.lse, math.inf),
            scoring.scale,
            scoring.causal,
            scoring.softcap or 0.0,
            window_size_left=left,
            window_size_right=right,
            cu_seqlens_q=segments.cu_q,
            cu_seqlens_k=segments.cu_k,
            max_seqlen_q=segments.max_q,
            max_seqlen_k=segments.max_k,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return d_q, d_k, d_v
