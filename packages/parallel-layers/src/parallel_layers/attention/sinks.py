"""Attention sinks: one learned score per head in the softmax's denominator (gpt-oss).

Kernels compute attention without sinks. With the kernel's output o and log-sum-exp L over the keys, and the keys' share
w = sigmoid(L - sink) of the softmax:

    out = w o,   log-sum-exp = log(e^L + e^sink),   d_sink = -sum_t w_t (1 - w_t) (o_t · d_out_t)

Terms of both signs cancel in d_sink, so the sum uses o, which is rounded once, instead of `out`, which is rounded
twice. If the sinks need a gradient, o `[T, Q, D]` is saved for the backward, too.

Shape legend: T tokens, Q query heads, D head size.
"""

import torch
from torch import Tensor


def _margin(lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    return lse_QT - sinks_Q.to(lse_QT.dtype)[:, None]


def lse_with_sinks(lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """Return the log-sum-exp of the whole softmax, `[Q, T]`."""
    return torch.logaddexp(lse_QT, sinks_Q.to(lse_QT.dtype)[:, None])


def out_with_sinks(out_TQD: Tensor, lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """Return the output of the whole softmax, `[T, Q, D]`, in the wider of the two dtypes."""
    return out_TQD * torch.sigmoid(_margin(lse_QT, sinks_Q)).T[..., None]


def gradient_of_sinks(d_out_TQD: Tensor, out_TQD: Tensor, lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """Return the sinks' gradient `[Q]` from the output's gradient and the kernel's output and log-sum-exp."""
    margin_QT = _margin(lse_QT, sinks_Q)
    products_QT = (out_TQD.to(lse_QT.dtype) * d_out_TQD).sum(-1).T
    return -(torch.sigmoid(margin_QT) * torch.sigmoid(-margin_QT) * products_QT).sum(-1).to(sinks_Q.dtype)
