"""The weights of a token's chosen experts from the router's logits, in one pass over memory each way.

    s = softmax(z) or sigmoid(z),   w = c s[experts],   with normalisation w = c s[experts] / Σ s[experts]

The backward computes s again. All arithmetic is fp32.

Shape legend: T tokens, E experts, k experts per token.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, rows_of_program, tl, triton

_ELEMENTS = 2048  # of a program


@triton.jit
def _scores(logits_ptr, token, tokens, size, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr):
    """Load the logits of tokens; return the scores of all experts."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens)[:, None] & (column < size)
    logits = tl.load(logits_ptr + token[:, None] * size + column, mask=mask, other=float("-inf"))
    if SOFTMAX:
        # A row beyond the last token has no largest logit.
        largest = tl.max(logits, axis=1)
        e = tl.exp(logits - tl.where(token < tokens, largest, 0.0)[:, None])
        return e / tl.where(token < tokens, tl.sum(e, axis=1), 1.0)[:, None]
    return tl.sigmoid(logits)


@triton.jit
def _chosen(scores, experts_ptr, token, tokens, number, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return whether each expert is a token's choice of this number, and the score of the choice."""
    expert = tl.load(experts_ptr + token * K + number, mask=token < tokens, other=0)
    is_choice = tl.arange(0, BLOCK)[None, :] == expert[:, None]
    return is_choice, tl.sum(tl.where(is_choice, scores, 0.0), axis=1)


@triton.jit
def _top_weights_kernel(
    logits_ptr, experts_ptr, weights_ptr, tokens, size, scale, least, offset,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    scores = _scores(logits_ptr, token, tokens, size, SOFTMAX, BLOCK)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if NORMALIZE:
        for number in tl.static_range(K):
            total += _chosen(scores, experts_ptr, token, tokens, number, K, BLOCK)[1]
        total = tl.maximum(total + offset, least)
    else:
        total += 1.0
    for number in tl.static_range(K):
        score = _chosen(scores, experts_ptr, token, tokens, number, K, BLOCK)[1]
        tl.store(weights_ptr + token * K + number, scale * score / total, mask=token < tokens)


@triton.jit
def _top_weights_backward_kernel(
    logits_ptr, experts_ptr, dweights_ptr, dlogits_ptr, tokens, size, scale, least, offset,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    scores = _scores(logits_ptr, token, tokens, size, SOFTMAX, BLOCK)
    # Gradients of the chosen scores, and their sums with the scores.
    chosen = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    gradient = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    along = tl.zeros((ROWS,), dtype=tl.float32)
    for number in tl.static_range(K):
        is_choice, score = _chosen(scores, experts_ptr, token, tokens, number, K, BLOCK)
        dweight = scale * tl.load(dweights_ptr + token * K + number, mask=token < tokens, other=0.0)
        chosen += tl.where(is_choice, 1.0, 0.0)
        gradient += tl.where(is_choice, dweight[:, None], 0.0)
        total += score
        along += dweight * score
    if NORMALIZE:
        divisor = tl.maximum(total + offset, least)
        free = total + offset >= least  # else the divisor is a constant
        gradient = (gradient - chosen * tl.where(free, along / divisor, 0.0)[:, None]) / divisor[:, None]
    if SOFTMAX:
        dlogits = scores * (gradient - tl.sum(gradient * scores, axis=1)[:, None])
    else:
        dlogits = gradient * scores * (1.0 - scores)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens)[:, None] & (column < size)
    tl.store(dlogits_ptr + token[:, None] * size + column, dlogits, mask=mask)


@on_its_device
def _launch(
    logits: Tensor, kernel: Any, experts: Tensor, *tensors: Tensor, softmax: bool, normalize: bool, scale: float
) -> None:
    if experts.numel():
        tokens, size = logits.shape
        block = next_power_of_2(size)
        rows = rows_of_program(tokens, max(1, _ELEMENTS // block), logits.device)
        # All sigmoids can underflow to 0, as can the softmax scores of experts that a bias chose.
        least, offset = (1e-12, 0.0) if softmax else (0.0, 1e-20)
        kernel[(cdiv(tokens, rows),)](
            logits.contiguous(), experts.contiguous(), *tensors, tokens, size, scale, least, offset,
            SOFTMAX=softmax, NORMALIZE=normalize, K=experts.shape[1], ROWS=rows, BLOCK=block,
            num_warps=max(1, min(4, rows * block // 128)),
        )  # fmt: skip


@torch.library.custom_op("parallel_layers::top_weights", mutates_args=())
def top_weights(logits_TE: Tensor, experts_Tk: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    """Return the weights of the chosen experts, `[T, E]` fp32 and `[T, k]` int64 -> `[T, k]` fp32. Gradient: logits.

    `softmax=False` scores by sigmoid. `normalize` divides a token's weights by their sum, `scale` is c.
    """
    weights = _empty(logits_TE, experts_Tk, softmax, normalize, scale)
    _launch(logits_TE, _top_weights_kernel, experts_Tk, weights, softmax=softmax, normalize=normalize, scale=scale)
    return weights


@top_weights.register_fake
def _empty(logits_TE: Tensor, experts_Tk: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    return logits_TE.new_empty(experts_Tk.shape)


@torch.library.custom_op("parallel_layers::top_weights_backward", mutates_args=())
def _backward(
    d_weights: Tensor, logits: Tensor, experts: Tensor, softmax: bool, normalize: bool, scale: float
) -> Tensor:
    d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    tensors = experts, d_weights.contiguous(), d_logits
    _launch(logits, _top_weights_backward_kernel, *tensors, softmax=softmax, normalize=normalize, scale=scale)
    return d_logits


@_backward.register_fake
def _(d_weights: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _gradients(ctx: Any, d_weights: Tensor) -> tuple[Tensor | None, ...]:
    logits, experts = ctx.saved_tensors
    return _backward(d_weights, logits, experts, *ctx.options), None, None, None, None


top_weights.register_autograd(_gradients, setup_context=_save)
