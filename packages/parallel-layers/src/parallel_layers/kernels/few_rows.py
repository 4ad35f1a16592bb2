"""Routed experts on few tokens, at the rate at which memory gives their weights. No gradient.

The tokens of a decoding step give an expert about ten rows, so that reading its weights is all the work. Three kernels
read each weight once: one finds the rows of every expert, one multiplies by gate and up and applies the activation, and
one multiplies by down. `rows.sum_rows` then adds up the rows of each token. No program waits for the host, so a CUDA
graph can capture them.

Shape legend: T tokens, k experts per token, M = T · k rows, e experts of this rank, H hidden, I intermediate size.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.kernels.float8 import quantize_rows
from parallel_layers.kernels.gated_experts import GLU
from parallel_layers.kernels.rows import sum_rows
from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton

_BLOCK = 1024


class Places(NamedTuple):
    """The rows in order of expert: the place of each row, the row at each place, and where each expert's places begin.

    Attributes:
        of_rows: `[M]` int32; row t · k + i is choice i of token t. -1 where another rank has the expert.
        rows: `[M]` int32; the end is arbitrary where other ranks have experts.
        begins: `[e + 1]` int32.
    """

    of_rows: Tensor
    rows: Tensor
    begins: Tensor


@triton.jit
def _places_kernel(experts_ptr, of_rows_ptr, rows_ptr, begins_ptr, num_rows, first, BLOCK: tl.constexpr):
    # Program 0 marks the rows of other ranks' experts, the others place the rows of an expert each.
    number, local = tl.program_id(0), tl.num_programs(0) - 1
    own = number - 1
    before, count = 0, 0
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        expert = tl.load(experts_ptr + row, mask=row < num_rows, other=-1).to(tl.int32) - first
        before += tl.sum(((expert >= 0) & (expert < own)).to(tl.int32), 0)
        count += tl.sum((expert == own).to(tl.int32), 0)
        elsewhere = ((expert < 0) | (expert >= local)) & (row < num_rows)
        tl.store(of_rows_ptr + row, -1, mask=elsewhere & (number == 0))
    if number > 0:
        tl.store(begins_ptr + number, before + count)
        for begin in range(0, num_rows, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            expert = tl.load(experts_ptr + row, mask=row < num_rows, other=-1).to(tl.int32) - first
            is_own = (expert == own) & (row < num_rows)
            place = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(rows_ptr + place, row, mask=is_own)
            tl.store(of_rows_ptr + row, place, mask=is_own)
            before += tl.sum(is_own.to(tl.int32), 0)
    else:
        tl.store(begins_ptr, 0)


@triton.jit
def _rows(x_ptr, inner, size, mask, EVEN: tl.constexpr):
    """Load a tile of the rows, `[BK, BM]`, with zeros beyond the contraction's size."""
    if EVEN:
        return tl.load(x_ptr, mask=mask, other=0.0)
    return tl.load(x_ptr, mask=mask & (inner < size)[:, None], other=0.0)


@triton.jit
def _weights(w_ptr, inner, size, mask, EVEN: tl.constexpr):
    """Load a tile of a weight, `[BN, BK]`, with zeros beyond its sizes."""
    if EVEN:
        return tl.load(w_ptr)
    return tl.load(w_ptr, mask=mask[:, None] & (inner < size)[None, :], other=0.0)


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scale_ptr, rows_ptr, begins_ptr, weights_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, top_k, hidden, size,
    expert_stride, out_stride, in_stride, up_offset, step, alpha, limit, offset,
    SCALED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    begin = tl.load(begins_ptr + expert)
    count = tl.load(begins_ptr + expert + 1) - begin
    column, inner = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_columns = column < size
    gate_column = step * column
    for first in range(0, count, BM):
        number = first + tl.arange(0, BM)
        mask = number < count
        row = tl.load(rows_ptr + begin + number, mask=mask, other=0)
        gate, up = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
        gate_ptr = w_ptr + expert * expert_stride + gate_column[:, None] * out_stride + inner[None, :] * in_stride
        up_ptr = gate_ptr + up_offset * out_stride
        token_ptr = x_ptr + (row // top_k).to(tl.int64)[None, :] * hidden + inner[:, None]
        for at in range(0, hidden, BK):
            x = _rows(token_ptr, at + inner, hidden, mask[None, :], EVEN)
            gate = tl.dot(_weights(gate_ptr, at + inner, hidden, in_columns, EVEN), x, gate, input_precision="ieee")
            up = tl.dot(_weights(up_ptr, at + inner, hidden, in_columns, EVEN), x, up, input_precision="ieee")
            gate_ptr += BK * in_stride
            up_ptr += BK * in_stride
            token_ptr += BK
        if SCALED:
            of_expert = scale_ptr + expert * 2 * size + gate_column
            of_token = tl.load(x_scale_ptr + row // top_k, mask=mask, other=0.0)[None, :]
            gate *= tl.load(of_expert, mask=in_columns, other=0.0)[:, None] * of_token
            up *= tl.load(of_expert + up_offset, mask=in_columns, other=0.0)[:, None] * of_token
        if BIAS:
            of_expert = bias_ptr + expert * 2 * size + gate_column
            gate += tl.load(of_expert, mask=in_columns, other=0.0).to(tl.float32)[:, None]
            up += tl.load(of_expert + up_offset, mask=in_columns, other=0.0).to(tl.float32)[:, None]
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + offset
        weight = tl.load(weights_ptr + row, mask=mask, other=0.0).to(tl.float32)
        y = weight[None, :] * gate * tl.sigmoid(alpha * gate) * up
        place = (begin + number).to(tl.int64)
        tl.store(
            y_ptr + place[None, :] * size + column[:, None], y.to(y_ptr.dtype.element_ty),
            mask=mask[None, :] & in_columns[:, None],
        )  # fmt: skip


@triton.jit
def _down_kernel(
    x_ptr, x_scale_ptr, rows_ptr, begins_ptr, weights_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, size, hidden,
    expert_stride, out_stride, in_stride, share,
    SCALED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    begin = tl.load(begins_ptr + expert)
    count = tl.load(begins_ptr + expert + 1) - begin
    column, inner = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_columns = column < hidden
    for first in range(0, count, BM):
        number = first + tl.arange(0, BM)
        mask = number < count
        place = (begin + number).to(tl.int64)
        y = tl.zeros((BN, BM), tl.float32)
        down_ptr = w_ptr + expert * expert_stride + column[:, None] * out_stride + inner[None, :] * in_stride
        row_ptr = x_ptr + place[None, :] * size + inner[:, None]
        for at in range(0, size, BK):
            x = _rows(row_ptr, at + inner, size, mask[None, :], EVEN)
            y = tl.dot(_weights(down_ptr, at + inner, size, in_columns, EVEN), x, y, input_precision="ieee")
            down_ptr += BK * in_stride
            row_ptr += BK
        if SCALED:
            of_row = tl.load(x_scale_ptr + place, mask=mask, other=0.0)[None, :]
            y *= tl.load(scale_ptr + expert * hidden + column, mask=in_columns, other=0.0)[:, None] * of_row
        if BIAS:
            row = tl.load(rows_ptr + begin + number, mask=mask, other=0)
            weight = share * tl.load(weights_ptr + row, mask=mask, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + expert * hidden + column, mask=in_columns, other=0.0).to(tl.float32)
            y += weight[None, :] * bias[:, None]
        tl.store(
            y_ptr + place[None, :] * hidden + column[:, None], y.to(y_ptr.dtype.element_ty),
            mask=mask[None, :] & in_columns[:, None],
        )  # fmt: skip


@on_its_device
def place_rows(experts_Tk: Tensor, first: int, num_local: int) -> Places:
    """Return the places of rows, of which this rank has the experts `first` to `first + num_local - 1`."""
    num_rows = experts_Tk.numel()
    of_rows = torch.empty(num_rows, dtype=torch.int32, device=experts_Tk.device)
    places = Places(of_rows, torch.empty_like(of_rows), of_rows.new_empty(num_local + 1))
    _places_kernel[(num_local + 1,)](experts_Tk.contiguous(), *places, num_rows, first, BLOCK=_BLOCK, num_warps=4)
    return places


@on_its_device
def experts_of_few_rows(
    x_TH: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up: Tensor,
    down: Tensor,
    glu: GLU,
    *,
    first: int = 0,
    input_major: bool = False,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    bias_share: float = 1.0,
) -> Tensor:
    """Return the sum of weight · down(activation(gate_up(x))) over each token's experts on this rank: `[T, H]`.

    Gate and up stay in fp32 until the weighted activation is rounded.

    Args:
        x_TH: `[T, H]`, contiguous, in the dtype of weights without scales.
        experts_Tk: `[T, k]` integers.
        weights_Tk: `[T, k]`.
        gate_up, down: `[e, 2I, H]` and `[e, H, I]`; input-major `[e, H, 2I]` and `[e, I, H]`.
        glu: The activation, and whether the columns of gate and up alternate.
        first: The number of this rank's first expert.
        input_major: See `gate_up`.
        gate_up_scales, down_scales: `[e, 2I]` and `[e, H]` fp32, contiguous: the scales of weights whose rows are in
            FP8, as are x and the activations then; None: the weights are in x's dtype.
        gate_up_bias, down_bias: `[e, 2I]` and `[e, H]`, or None.
        bias_share: The part of the bias of down that this rank adds.
    """
    num_tokens, top_k = experts_Tk.shape
    hidden, num_local = x_TH.shape[1], len(gate_up)
    size = gate_up.shape[2 if input_major else 1] // 2
    places = place_rows(experts_Tk, first, num_local)
    order = (2, 1) if input_major else (1, 2)
    mean = cdiv(num_tokens * top_k, num_local)
    tile = min(64, max(16, next_power_of_2(mean + mean // 3)))
    weights = weights_Tk.contiguous()
    inner = x_TH.new_empty(num_tokens * top_k, size)
    x, x_scales = (x_TH, None) if gate_up_scales is None else quantize_rows(x_TH)
    rows = x_TH.new_empty(num_tokens * top_k, hidden)
    up_offset, step = (1, 2) if glu.alternating else (size, 1)
    columns, depth = 64, 128 if tile <= 16 else 64
    _gate_up_kernel[(cdiv(size, columns), num_local)](
        x, x_scales, places.rows, places.begins, weights, gate_up, gate_up_scales, gate_up_bias, inner,
        top_k, hidden, size,
        gate_up.stride(0), *(gate_up.stride(dim) for dim in order), up_offset, step, glu.alpha, glu.limit, glu.offset,
        SCALED=gate_up_scales is not None, BIAS=gate_up_bias is not None,
        EVEN=size % columns == hidden % depth == 0, BM=tile, BN=columns, BK=depth, num_stages=3, num_warps=4,
    )  # fmt: skip
    activated, row_scales = (inner, None) if down_scales is None else quantize_rows(inner)
    columns, depth = 128, 128 if tile <= 16 else 64
    _down_kernel[(cdiv(hidden, columns), num_local)](
        activated, row_scales, places.rows, places.begins, weights, down, down_scales, down_bias, rows, size, hidden,
        down.stride(0), *(down.stride(dim) for dim in order), bias_share,
        SCALED=down_scales is not None, BIAS=down_bias is not None,
        EVEN=hidden % columns == size % depth == 0, BM=tile, BN=columns, BK=depth, num_stages=3, num_warps=8,
    )  # fmt: skip
    return sum_rows(rows, places.of_rows, top_k)
