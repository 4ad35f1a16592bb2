"""One token for each of M sequences, in place: states of the gated delta rule and Mamba-2, windows of convolutions.

A program takes some columns of the state of one head: it reads them once and writes them once. With the names of
`linear_attention.recurrent`: v is x, k is B, q is C, and beta is dt for Mamba-2, whose log decay is dt A.

Shape legend: M tokens, C channels, W tokens of the window, K key heads, V value heads, D key size, E value size.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton, use_triton

COLUMNS, WARPS = 64, 4
_CHANNELS = 256


@triton.jit
def _state_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, decays_ptr, rates_ptr, beta_ptr, skip_ptr, live_ptr, out_ptr,
    state_stride, q_stride, k_stride, v_stride, decay_stride, beta_stride, heads, group, scale,
    DIM: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = row < DIM, column < HEAD_DIM
    mask = in_rows[:, None] & in_columns[None, :]
    state_ptr += token * state_stride + head * (DIM * HEAD_DIM) + row[:, None] * HEAD_DIM + column[None, :]
    state = tl.load(state_ptr, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + token * q_stride + head // group * DIM + row, mask=in_rows, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * k_stride + head // group * DIM + row, mask=in_rows, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_stride + head * HEAD_DIM + column, mask=in_columns, other=0.0).to(tl.float32)
    if NORMALIZE:
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    if PER_CHANNEL:
        decays = tl.load(decays_ptr + token * decay_stride + head * DIM + row, mask=in_rows, other=0.0)
        state *= tl.exp(decays.to(tl.float32))[:, None]
    else:
        decay = tl.load(decays_ptr + token * decay_stride + head).to(tl.float32)
        if rates_ptr is not None:
            decay *= tl.load(rates_ptr + head).to(tl.float32)
        state *= tl.exp(decay)
    written = v
    if DELTA:
        written -= tl.sum(k[:, None] * state, 0)
    written *= tl.load(beta_ptr + token * beta_stride + head).to(tl.float32)
    state += k[:, None] * written[None, :]
    out = tl.sum(q[:, None] * state, 0) * scale
    if skip_ptr is not None:
        out += tl.load(skip_ptr + head).to(tl.float32) * v
    if live_ptr is not None:
        mask = mask & (tl.load(live_ptr + token) != 0)
    tl.store(state_ptr, state.to(state_ptr.dtype.element_ty), mask=mask)
    out_ptr += (token * heads + head) * HEAD_DIM + column
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=in_columns)


@triton.jit
def _window_kernel(
    window_ptr, x_ptr, weight_ptr, bias_ptr, live_ptr, out_ptr, window_stride, x_stride, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    token, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    changes = inside
    if live_ptr is not None:
        changes = inside & (tl.load(live_ptr + token) != 0)
    window_ptr += token * window_stride + channel
    out = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(WIDTH):
        if number + 1 < WIDTH:
            x = tl.load(window_ptr + number * channels, mask=inside, other=0.0)
        else:
            x = tl.load(x_ptr + token * x_stride + channel, mask=inside, other=0.0).to(window_ptr.dtype.element_ty)
        if number > 0:
            tl.store(window_ptr + (number - 1) * channels, x, mask=changes)
        tap = tl.load(weight_ptr + channel * WIDTH + number, mask=inside, other=0.0)
        out += x.to(tl.float32) * tap.to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        out *= tl.sigmoid(out)
    tl.store(out_ptr + token * channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def supports_steps(rows: Tensor, *tensors: Tensor) -> bool:
    """Return whether the kernels take the tensors and update `rows`: at most fp32, on CUDA, each row contiguous."""
    return use_triton(rows, *tensors) and _is_dense(rows)


@on_its_device
def update_states(
    rows: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor, beta: Tensor, live: Tensor | None, *,
    delta: bool, rates: Tensor | None = None, skip: Tensor | None = None, scale: float = 1.0, normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Update the states `rows [M, V, D, E]` by a token each, and return the outputs `[M, V, E]` in v's dtype.

    `delta`: see `gated_delta_step_`; else `state_space_step_` with log decays `decays` times `rates`, and `skip`.
    """
    (tokens, heads, head_dim), dim = v.shape, k.shape[2]
    out = v.new_empty(v.shape)
    q, k, v, decays, beta = (x if _is_dense(x) else x.contiguous() for x in (q, k, v, decays, beta))
    columns = min(COLUMNS, next_power_of_2(head_dim))
    if tokens:
        _state_kernel[(tokens, heads, cdiv(head_dim, columns))](
            rows, q, k, v, decays, rates, beta, skip, _bytes(live), out,
            *(x.stride(0) for x in (rows, q, k, v, decays, beta)), heads, heads // k.shape[1], scale,
            DIM=dim, HEAD_DIM=head_dim, ROWS=next_power_of_2(dim), COLUMNS=columns, DELTA=delta, NORMALIZE=normalize,
            PER_CHANNEL=decays.dim() == 3, num_warps=WARPS,
        )  # fmt: skip
    return out


@on_its_device
def update_windows(
    rows: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, live: Tensor | None, silu: bool
) -> Tensor:
    """Update the windows `rows [M, W - 1, C]` by a token each, and return `[M, C]`; see `convolution_step_`."""
    (tokens, channels), width = x.shape, weight.shape[1]
    out = x.new_empty(x.shape)
    x = x if _is_dense(x) else x.contiguous()
    if tokens:
        _window_kernel[(tokens, cdiv(channels, _CHANNELS))](
            rows, x, weight.contiguous(), bias, _bytes(live), out, rows.stride(0), x.stride(0), channels,
            WIDTH=width, BLOCK=_CHANNELS, SILU=silu, num_warps=4,
        )  # fmt: skip
    return out


def _is_dense(x: Tensor) -> bool:
    """Return whether the numbers of each row lie side by side."""
    return len(x) == 0 or x[0].is_contiguous()


def _bytes(live: Tensor | None) -> Tensor | None:
    return None if live is None else live.view(torch.uint8)
