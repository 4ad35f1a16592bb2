"""Products of queries or keys with keys inside a chunk, under decays, and their gradients.

Shape legend: M chunks of C tokens, K key heads, G value heads of a key head, D key size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def decayed_products(q: Tensor, k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_d k_id k_jd exp(c_id - c_jd) and Σ_d q_id k_jd exp(c_id - c_jd) for j <= i, else 0, `[M, K, G, C, C]`.

    q and k are `[M, K, 1, C, D]`; `sums` is c, `[M, K, G, C, 1]` or `[M, K, G, C, D]`, and does not increase.

    With a factor per head, products are multiplied by factors. With a factor per channel, blocks with the rows of a
    later half and the columns of an earlier half of 1, 2, 4 and more tokens are computed one by one: the sums at the
    end of the earlier half lie between those of the rows and the columns, so that no exponent is positive.
    """
    if sums.shape[-1] == 1:
        factors = decay_factors(sums, k.dtype)
        return (k @ k.mT) * factors, (q @ k.mT) * factors
    rows = torch.stack([k, q])
    products = (rows * k).sum(-1).expand(2, *sums.shape[:-1])[..., None, None]
    for half, later, earlier in _halves(sums, k.dtype):
        block = (_half(rows, half, 1) * later) @ (_half(k, half, 0) * earlier).mT
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        products = torch.cat([upper, torch.cat([block, second], -1)], -2)
    to_keys, to_queries = products.squeeze(-3)
    return to_keys, to_queries


def gradients_of_products(
    q: Tensor, k: Tensor, sums: Tensor, d_keys: Tensor, d_queries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q and k, `[M, K, G, C, D]`, and of the log decays, in the shape of `sums`.

    `d_keys` and `d_queries` (0 for j >= i) are the gradients of the products, `[M, K, G, C, C]`. The decay of token m
    is in the products of the rows i >= m with the columns j < m.
    """
    if sums.shape[-1] == 1:
        factors = decay_factors(sums, k.dtype)
        d_keys, d_queries = d_keys * factors, d_queries * factors
        by_pair = d_keys * (k @ k.mT) + d_queries * (q @ k.mT)
        d_decay = sum_from(by_pair).tril(-1).sum(-1, keepdim=True)
        return d_queries @ k, (d_keys + d_keys.mT) @ k + d_queries.mT @ q, d_decay
    rows, columns, d_decay = (k.new_zeros(*count, *sums.shape) for count in ((2,), (), ()))
    inputs, d_products = torch.stack([k, q]), torch.stack([d_keys, d_queries])
    for half, later, earlier in _halves(sums, k.dtype):
        blocks = d_products.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))[..., 1, :, :, 0, :]
        d_block = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        later_inputs, earlier_keys = _half(inputs, half, 1), _half(k, half, 0)
        d_rows = later * (d_block @ (earlier_keys * earlier))
        d_columns = earlier * (d_block.mT @ (later_inputs * later)).sum(0)
        _half(rows, half, 1).add_(d_rows)
        _half(columns, half, 0).add_(d_columns)
        _half(d_decay, half, 1).add_(sum_from((later_inputs * d_rows).sum(0)))
        _half(d_decay, half, 0).add_(sum_before(earlier_keys * d_columns))
    rows_k, rows_q = rows
    return rows_q, rows_k + columns, d_decay


def sum_from(x: Tensor) -> Tensor:
    """Return Σ_{i >= m} x_i over the dim before the last one."""
    return x.flip(-2).cumsum(-2).flip(-2)


def sum_before(x: Tensor) -> Tensor:
    """Return Σ_{j < m} x_j over the dim before the last one, without a difference of sums: x_m can be much larger."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def decay_factors(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(c_i - c_j) for j <= i, else 0: c `[..., C, 1]` -> `[..., C, C]`."""
    later = torch.ones(sums.shape[-2], sums.shape[-2], dtype=torch.bool, device=sums.device).triu(1)
    return (sums - sums.mT).masked_fill_(later, float("-inf")).to(dtype).exp()


def _half(x: Tensor, half: int, number: int) -> Tensor:
    """View the earlier (0) or later (1) half of every 2 half tokens: `[..., C, D]` -> `[..., C / 2 half, half, D]`."""
    return x.unflatten(-2, (-1, 2, half))[..., number, :, :]


def _halves(sums: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield halves, and exp(c - c_m) of later and exp(c_m - c) of earlier tokens, where m ends the earlier half."""
    for half in (1 << n for n in range(sums.shape[-2].bit_length() - 1)):
        earlier, later = _half(sums, half, 0), _half(sums, half, 1)
        middle = earlier[..., -1:, :]
        yield half, (later - middle).to(dtype).exp(), (middle - earlier).to(dtype).exp()
