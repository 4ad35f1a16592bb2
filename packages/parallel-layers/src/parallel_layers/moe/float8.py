"""`float8_grouped_linear`: the experts' GEMMs in FP8, forward, dx and dW.

Each operand of a GEMM is rounded to float8_e4m3fn with scales that are powers of two. Tokens have one scale for each
row, and in the forward each row of a weight has one, too. The weight of dx and both operands of dW, whose sums run over
these rows, have one scale for each expert. Sums and results are as without FP8.

Shape suffixes: as in `experts`; P columns, the rows of each expert padded to a multiple of `PADDING`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parallel_layers.device.gpus import gpu
from parallel_layers.device.names import GPU
from parallel_layers.kernels.float8 import (
    PADDING,
    quantize_rows,
    quantize_transposed,
    scales_of_groups,
    transpose_groups,
)
from parallel_layers.kernels.quack import is_hopper
from parallel_layers.kernels.runtime import device_type, planning
from parallel_layers.module.autocast import as_operand, without_autocast
from parallel_layers.moe.dispatch import Move
from parallel_layers.moe.experts import grouped_linear

Scaled = tuple[Tensor, Tensor]
"""Numbers in FP8, and scales."""

MULTIPLE = 16
"""The divisor of all sizes of a GEMM in FP8, in which a row is a multiple of 16 bytes."""


def why_not_float8_experts(weight_eNK: Tensor) -> str | None:
    """Return why experts with this weight stay in their dtype; None when they can be in FP8."""
    if any(size % MULTIPLE for size in weight_eNK.shape[1:]):
        return f"their sizes {list(weight_eNK.shape[1:])} are no multiples of {MULTIPLE}"
    device = weight_eNK.device
    if device.type == "meta" and not planning() and gpu.is_available():  # before its weights are on the GPU
        device = torch.device(GPU, gpu.current_device())
    wrong_gpu = device_type(device) == GPU and not is_hopper(device)
    return "torch's grouped FP8 GEMM needs a Hopper GPU" if wrong_gpu else None


def float8_grouped_linear(
    x_MK: Tensor,
    weight_eNK: Tensor,
    counts_e: Tensor,
    before: Move | None = None,
    after: Move | None = None,
    *,
    input_major: bool = False,
) -> Tensor:
    """Return `grouped_linear` of the operands in FP8, `[M, K]`, `[e, N, K]` -> `[M, N]`; dx and dW are in FP8, too.

    With `before`, x has tokens `[T, K]`, which are copied to rows in FP8. With `after` the results are summed to tokens
    `[T, N]`, whose gradients are copied to rows in FP8.

    bf16 on a Hopper GPU is one GEMM without host synchronisation. Elsewhere the operands are dequantised, and
    `grouped_linear` multiplies them: the same numbers, at no gain.
    """
    x_MK, weight_eNK = as_operand(x_MK), as_operand(weight_eNK)
    weight_eNK = weight_eNK.transpose(1, 2) if input_major else weight_eNK
    if not len(x_MK):
        return grouped_linear(x_MK, weight_eNK, counts_e)
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    out: Tensor = _Float8GroupedLinear.apply(x_MK, weight_eNK, ends_e, before, after)
    return out


class _Float8GroupedLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, before: Move | None, after: Move | None) -> Tensor:
        rows = _rows(x, before)
        of_weight, scales = along(weight)
        ctx.save_for_backward(*(rows if ctx.needs_input_grad[1] else (None, None)), weight, scales.amax(1), ends)
        ctx.before, ctx.after = before, after
        y = _by_rows(rows, (of_weight, scales), ends, x.dtype)
        return y if after is None else after.to_tokens(y)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, scales_of_x, weight, scales, ends = ctx.saved_tensors
        d_rows = _rows(dy, ctx.after)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _by_rows(d_rows, along(weight.transpose(1, 2), scales), ends, dy.dtype)
            dx = dx if ctx.before is None else ctx.before.to_tokens(dx)
        if ctx.needs_input_grad[1]:
            dw = _by_columns(d_rows, (q, scales_of_x), ends, weight.dtype)
        return dx, dw, None, None, None


def _rows(x: Tensor, move: Move | None) -> Scaled:
    """Quantise rows; with a move, quantise tokens and copy them to rows."""
    q, scales = quantize_rows(x)
    if move is None:
        return q, scales
    bytes_of_rows = move.to_rows(q.view(torch.uint8))
    return bytes_of_rows.view(q.dtype), scales.index_select(0, move.order // move.top_k)


def along(weight_eNK: Tensor, scales_e: Tensor | None = None) -> Scaled:
    """Quantise `[e, N, K]` for a sum over K: with one scale for each row `[e, N]`, or for each expert, in rows of K.

    Rows that are consecutive in memory have separate scales. A transposed weight has one scale for each expert:
    `scales_e`, or the scale of its largest number.
    """
    if weight_eNK.is_contiguous():
        return quantize_rows(weight_eNK)
    stored = weight_eNK.transpose(1, 2)
    if scales_e is None:
        largest = torch.linalg.vector_norm(stored, torch.inf, dim=(1, 2))
        scales_e = quantize_rows(largest[:, None])[1]
    return quantize_transposed(stored, scales_e), scales_e[:, None].expand(weight_eNK.shape[:2]).contiguous()


def _by_rows(x: Scaled, weight: Scaled, ends_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each run of rows `[M, K]` times the transposed weight `[e, N, K]` of its expert: `[M, N]`."""
    (x_MK, scales_M), (weight_eNK, scales_eN) = x, weight
    if _has_kernel(weight_eNK, dtype):
        return _grouped_mm(x_MK, weight_eNK.transpose(1, 2), scales_M, scales_eN, ends_e)
    dense_x, dense_weight = (q.to(dtype) * scales[..., None].to(dtype) for q, scales in (x, weight))
    return grouped_linear(dense_x, dense_weight, ends_e.diff(prepend=ends_e.new_zeros(1)))


def _by_columns(dy: Scaled, x: Scaled, ends_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `dy^T x` of each run of rows `[M, N]` and `[M, K]`: `[e, N, K]`."""
    rows, experts = len(dy[0]), len(ends_e)
    counts = ends_e.diff(prepend=ends_e.new_zeros(1))
    # An expert without rows has columns of zeros, so its gradient is zero.
    padded = ((counts.clamp(min=1) + PADDING - 1) // PADDING * PADDING).cumsum(0, dtype=torch.int32)
    room = (rows // PADDING + experts) * PADDING
    by_expert = [(scales_of_groups(scales, ends_e), q, scales) for q, scales in (dy, x)]
    operands = [(transpose_groups(q, scales, common, ends_e, padded, room), common) for common, q, scales in by_expert]
    (dy_NP, scales_of_dy), (x_KP, scales_of_x) = operands
    if _has_kernel(dy_NP, dtype):
        flat = [common[:, None].expand(-1, len(q)).flatten() for q, common in operands]
        return _grouped_mm(dy_NP, x_KP.t(), flat[0], flat[1], padded)
    runs = [torch.tensor_split(q.to(dtype), padded[:-1].tolist(), dim=1) for q, _ in operands]
    products = torch.stack([of_dy @ of_x.t() for of_dy, of_x in zip(*runs, strict=True)])
    return products * (scales_of_dy * scales_of_x)[:, None, None].to(dtype)


def _has_kernel(operand: Tensor, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and is_hopper(operand.device)


def _grouped_mm(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, ends: Tensor) -> Tensor:
    by_row = F.ScalingType.RowWise
    result: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, b, scales_a, by_row, scales_b, by_row, offs=ends, output_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result
