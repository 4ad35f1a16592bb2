"""State-space duality in chunks, in plain torch: the delta rule's form of `chunked` without the correction of values.

https://arxiv.org/abs/2405.21060, section 6. With the sums c_i of the log decays up to token i of a chunk, the state X
before the chunk and the state Y behind it:

    P_ij = (q_i · k_j) exp(c_i - c_j) for j <= i        N = β v
    o = exp(c) (q X) + P N                              Y = exp(c_C) X + kᵀ (exp(c_C - c) N)

q (C of the paper) and k (B) stay one for all value heads of a group, so that no tensor has D numbers for each token of
each value head.

Shape legend: M chunks of C tokens, K groups, G = V / K value heads of a group, D state size, E value size.
"""

import torch
from torch import Tensor

from parallel_layers.linear_attention.chunked import Inputs, factors_of
from parallel_layers.linear_attention.products import decay_factors, sum_before, sum_from


def forward(x: Inputs, first: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs `[M, K, G, C, E]` and the states behind the chunks; see `chunked.forward`."""
    growth, _ = factors_of(x)
    before, behind = _states(x, first, start)
    products = (x.q @ x.k.mT) * decay_factors(x.sums, x.k.dtype)
    return growth * (x.q @ before) + products @ (x.beta * x.v), behind


def backward(
    x: Inputs, first: Tensor, start: Tensor | None, d_out: Tensor, d_behind: Tensor | None
) -> tuple[Inputs, Tensor | None]:
    """Return the gradients of the inputs and of the states `start`, if any; see `chunked.backward`."""
    growth, to_end = factors_of(x)
    before, _ = _states(x, first, start)
    d_states, d_before = _gradients_of_states(x, first, d_out, d_behind)
    factors, n = decay_factors(x.sums, x.k.dtype), x.beta * x.v
    products = (x.q @ x.k.mT) * factors
    d_products = d_out @ n.mT
    written, read = to_end * (x.k @ d_states), growth * (x.q @ before)
    d_n = products.mT @ d_out + written
    # Each decay is in the products of the rows from its token on with the columns before it, in what these rows read
    # of the state before, in what these columns leave in the state behind, and between the two states.
    d_decay = sum_from(d_products * products).tril(-1).sum(-1, keepdim=True)
    d_decay += sum_from((d_out * read).sum(-1, keepdim=True)) + sum_before((n * written).sum(-1, keepdim=True))
    d_decay += growth[..., -1:, :] * (before * d_states).sum((-2, -1), keepdim=True)
    d_products *= factors
    d_q = (d_products @ x.k + (growth * d_out) @ before.mT).sum(2, keepdim=True)
    d_k = (d_products.mT @ x.q + (to_end * n) @ d_states.mT).sum(2, keepdim=True)
    d_start = None if start is None else d_before
    return Inputs(d_q, d_k, x.beta * d_n, d_decay, (d_n * x.v).sum(-1, keepdim=True)), d_start


def summary(x: Inputs, first: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return maps of states as `chunked.summary`, `[S, K, G, D, 1 + E]`: the transition is one factor for each row."""
    growth, to_end = factors_of(x)
    factors, increment = growth[..., -1:, :], x.k.mT @ (to_end * x.beta * x.v)
    maps = torch.cat([torch.zeros_like(increment[..., :1]), increment], -1)
    maps[starts, ..., :1] = factors[starts].expand_as(maps[starts, ..., :1])
    return _scan(factors.masked_fill(first.view(-1, 1, 1, 1, 1), 0), maps)[ends]


def gradient_of_starts(x: Inputs, first: Tensor, d_out: Tensor) -> Tensor:
    """Return the gradients of the states before the chunks by the outputs alone, `[M, K, G, D, E]`."""
    return _gradients_of_states(x, first, d_out, None)[1]


def _scan(factors: Tensor, increment: Tensor) -> Tensor:
    """Overwrite `increment` by S_c = factors_c · S_{c-1} + increment_c."""
    for chunk in range(1, len(increment)):
        increment[chunk].addcmul_(factors[chunk], increment[chunk - 1])
    return increment


def _states(x: Inputs, first: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states before and behind each chunk, `[M, K, G, D, E]`; see `chunked.states_before`."""
    growth, to_end = factors_of(x)
    mask, ends = first.view(-1, 1, 1, 1, 1), growth[..., -1:, :]
    behind = x.k.mT @ (to_end * x.beta * x.v)
    if start is not None:
        behind += (ends * start).masked_fill_(~mask, 0)
    _scan(ends.masked_fill(mask, 0), behind)
    before = behind.roll(1, 0)
    return before.masked_fill_(mask, 0) if start is None else torch.where(mask, start, before), behind


def _gradients_of_states(x: Inputs, first: Tensor, d_out: Tensor, d_behind: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states behind the chunks, and of those before, `[M, K, G, D, E]` each."""
    growth, _ = factors_of(x)
    mask, ends = first.view(-1, 1, 1, 1, 1), growth[..., -1:, :]
    by_outputs = x.q.mT @ (growth * d_out)
    d_states = by_outputs.masked_fill(mask, 0).roll(-1, 0)
    if d_behind is not None:
        d_states += d_behind
    factors = ends.masked_fill(mask, 0)
    for chunk in range(len(d_states) - 1, 0, -1):
        d_states[chunk - 1].addcmul_(factors[chunk], d_states[chunk])
    return d_states, ends * d_states + by_outputs
