"""Attention sinks: one learned score a head that takes part in the softmax without a value (gpt-oss).

A kernel knows nothing of them. With o and L its output and log-sum-exp over the keys, and w = sigmoid(L - sink) the
share of the softmax that the keys keep,

    out = w o,   log-sum-exp = log(e^L + e^sink),   d_sink = -sum_t w_t (1 - w_t) (o_t · d_out_t).

d_sink is a sum of both signs over all tokens, so it is taken from o, which the kernel has rounded once, and not from
`out`, which is rounded again. Over a query's only key o is its value to the bit, and such queries have most of the sum.
So o is kept for the backward beside `out`: one more `[T, Q, D]`, where the sinks get a gradient.

Shape legend: T tokens, Q query heads, D head size.
"""

import torch
from torch import Tensor


def _margin(lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    return lse_QT - sinks_Q.to(lse_QT.dtype)[:, None]


def lse_with_sinks(lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """The log-sum-exp of the whole softmax."""
    return torch.logaddexp(lse_QT, sinks_Q.to(lse_QT.dtype)[:, None])


def out_with_sinks(out_TQD: Tensor, lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """The output of the whole softmax, from the kernel's output and log-sum-exp; in the wider of their dtypes."""
    return out_TQD * torch.sigmoid(_margin(lse_QT, sinks_Q)).T[..., None]


def gradient_of_sinks(d_out_TQD: Tensor, out_TQD: Tensor, lse_QT: Tensor, sinks_Q: Tensor) -> Tensor:
    """`[Q]`, from the gradient of the whole softmax's output, and the kernel's output and log-sum-exp."""
    margin_QT = _margin(lse_QT, sinks_Q)
    products_QT = (out_TQD.to(lse_QT.dtype) * d_out_TQD).sum(-1).T
    return -(torch.sigmoid(margin_QT) * torch.sigmoid(-margin_QT) * products_QT).sum(-1).to(sinks_Q.dtype)
