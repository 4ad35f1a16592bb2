"""The flash kernels: FlashAttention-4, flash-attn 2, and torch's own FlashAttention-2.

Each function calls a library's raw forward or backward, so that callers can pass a merged output and log-sum-exp to the
backward. The libraries are optional extras and imported at the first call.
"""

import functools
import math
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments


def _empty_as(lse: Tensor, value: float) -> Tensor:
    """Set the log-sum-exp of queries without keys to `value`. FlashAttention-2 uses +inf, `Kernel` -inf."""
    return lse.nan_to_num(nan=math.nan, posinf=value, neginf=value)


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    causal, options = scoring.causal and scoring.window is None, {"scale": scoring.scale, **scoring.flash_window}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *segments.bounds, 0.0, causal, False, **options, seqused_k=segments.used_k
    )
    return out, _empty_as(lse, -math.inf)


def _varlen_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = d_out.contiguous(), q, k, v, out, _empty_as(lse, math.inf)
    causal, options = scoring.causal and scoring.window is None, {"scale": scoring.scale, **scoring.flash_window}
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
        *inputs, *segments.bounds, 0.0, causal, *no_dropout, **options
    )
    return d_q, d_k, d_v


def _flash2_options(scoring: Scoring) -> dict[str, Any]:
    rule = {"softmax_scale": scoring.scale, "causal": scoring.causal, "softcap": scoring.softcap or 0.0}
    return {"dropout_p": 0.0, **rule, **scoring.flash_window}


def _flash2_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # an optional extra

    out, lse, *_ = _flash_attn_varlen_forward(
        q, k, v, *segments.bounds, **_flash2_options(scoring), seqused_k=segments.used_k
    )
    return out, _empty_as(lse, -math.inf)


def _flash2_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # an optional extra

    inputs = d_out, q, k, v, out, _empty_as(lse, math.inf)
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    options = _flash2_options(scoring) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    _flash_attn_varlen_backward(*inputs, d_q, d_k, d_v, *segments.bounds, **options, alibi_slopes=None)
    return d_q, d_k, d_v


@functools.cache
def _flash4() -> ModuleType:
    """Import flash-attn-4, an optional extra, and ignore its compiler's long warning about a dropped argument."""
    from flash_attn.cute import interface

    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
    return interface


def _flash4_options(segments: Segments, scoring: Scoring) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    window = {side: None if keys < 0 else keys for side, keys in scoring.flash_window.items()}
    return {**dict(zip(names, segments.bounds, strict=True)), **window}


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    rule = {"softmax_scale": scoring.scale, "causal": scoring.causal, "softcap": scoring.softcap}
    options = _flash4_options(segments, scoring)
    out, lse, *_ = _flash4()._flash_attn_fwd(q, k, v, **options, **rule, seqused_k=segments.used_k, return_lse=True)
    return out, _empty_as(lse, -math.inf)


def _flash4_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = q, k, v, out, d_out, _empty_as(lse, math.inf)
    rule = scoring.scale, scoring.causal, scoring.softcap or 0.0
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = _flash4_options(segments, scoring)
    d_q, d_k, d_v = _flash4()._flash_attn_bwd(*inputs, *rule, **options, deterministic=deterministic)
    return d_q, d_k, d_v


def _flash2_workspace(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return dq in fp32, a sum for each row, and where query heads share keys their separate dk and dv."""
    separate = [] if q.shape[1] == k.shape[1] else [torch.empty_like(q), torch.empty_like(q)]
    return [torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32), *separate]


def _flash4_workspace(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return dq in fp32, two numbers for each row, and where query heads share keys dk and dv in fp32."""
    sums = [q] if q.shape[1] == k.shape[1] else [q, k, v]
    numbers = q.new_empty(2, *q.shape[:2], dtype=torch.float32)
    return [numbers, *(torch.empty_like(x, dtype=torch.float32) for x in sums)]


# The ATen operators behind `torch.nn.attention.varlen.varlen_attn`, whose own backward takes no merged output and
# log-sum-exp. Both operators are the same in torch 2.11 to 2.13.
VARLEN = Kernel(_varlen_forward, _varlen_backward, _flash2_workspace)
FLASH_ATTENTION_2 = Kernel(_flash2_forward, _flash2_backward, _flash2_workspace)
# Kernels in the CuTe language for Hopper and Blackwell, compiled at the first call.
FLASH_ATTENTION_4 = Kernel(_flash4_forward, _flash4_backward, _flash4_workspace)
