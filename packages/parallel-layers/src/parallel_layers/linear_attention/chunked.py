"""The gated delta rule in chunks, in plain torch: matrix products inside a chunk, one state handed from chunk to chunk.

https://arxiv.org/abs/2412.06464, section 3.3, and with a gate per channel https://arxiv.org/abs/2510.26692, section 3.

With the sums c_i of the log decays up to token i of a chunk, the state X before the chunk and the state Y behind it:

    A_ij = Σ_d k_id k_jd exp(c_id - c_jd) for j < i        P_ij = Σ_d q_id k_jd exp(c_id - c_jd) for j <= i
    (I + β A) N = β (v - (k exp(c)) X)                     the values that the tokens write
    o = (q exp(c)) X + P N                                 Y = diag(exp(c_C)) X + (k exp(c_C - c))ᵀ N

No exponent is positive, so nothing overflows however strong the decay is. N is affine in X, and with it Y:
N = U - W X and Y = (diag(exp(c_C)) - (k exp(c_C - c))ᵀ W) X + (k exp(c_C - c))ᵀ U.

Shape legend: M chunks of C tokens, K key heads, G = V / K value heads of a key head, D key size, E value size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.linear_attention.products import decayed_products, gradients_of_products, sum_before, sum_from


class Inputs(NamedTuple):
    """The arguments of all chunks: q and k `[M, K, 1, C, D]`, v `[M, K, G, C, E]`, the sums c of the log decays
    `[M, K, G, C, D]` or `[M, K, G, C, 1]` in fp64, and beta `[M, K, G, C, 1]`.

    Where decays are strong, the error of an fp32 sum would be larger than that of all products together.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor
    beta: Tensor


def factors_of(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return exp(c) and exp(c_C - c)."""
    return x.sums.to(x.k.dtype).exp(), (x.sums[..., -1:, :] - x.sums).to(x.k.dtype).exp()


class _Parts(NamedTuple):
    """The factors that both the forward and the backward need; names as in the formulas above.

    `q_in`, `k_in` and `k_out` are q exp(c), k exp(c) and k exp(c_C - c) `[M, K, G, C, D]`, `end` is exp(c_C)
    `[M, K, G, D, 1]`. `transition` `[M, K, G, D, D]` is 0 at the first chunks of sequences; `from_start` is not, and is
    None where it is not asked for.
    """

    a: Tensor
    p: Tensor
    w: Tensor
    u: Tensor
    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    end: Tensor
    transition: Tensor
    from_start: Tensor | None


def _parts(x: Inputs, first: Tensor, *, starts: bool) -> _Parts:
    a, p = decayed_products(x.q, x.k, x.sums)
    growth, to_end = factors_of(x)
    k_in, k_out = x.k * growth, x.k * to_end
    # `unitriangular` reads neither the diagonal nor what is above.
    solved = torch.linalg.solve_triangular(
        x.beta * a, x.beta * torch.cat([k_in, x.v], -1), upper=False, unitriangular=True
    )
    w, u = solved.split([k_in.shape[-1], x.v.shape[-1]], -1)
    end = growth[..., -1:, :].mT.expand(*k_in.shape[:-2], k_in.shape[-1], 1)
    transition = torch.diag_embed(end.squeeze(-1)) - k_out.mT @ w
    from_start = transition.clone() if starts else None
    transition.masked_fill_(first.view(-1, 1, 1, 1, 1), 0)
    return _Parts(a, p, w, u, x.q * growth, k_in, k_out, end, transition, from_start)


def states_before(parts: _Parts, first: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states before and behind each chunk, `[M, K, G, D, E]`.

    `first [M]` marks the first chunks of sequences, which begin with the state `start [M, K, G, D, E]`, or zero.
    """
    mask = first.view(-1, 1, 1, 1, 1)
    increment = parts.k_out.mT @ parts.u
    if start is not None and parts.from_start is not None:
        increment += (parts.from_start @ start).masked_fill_(~mask, 0)
    behind = _scan(parts.transition, increment)
    before = behind.roll(1, 0)
    return before.masked_fill_(mask, 0) if start is None else torch.where(mask, start, before), behind


def _scan(transition: Tensor, increment: Tensor, *, reverse: bool = False) -> Tensor:
    """Overwrite `increment` by S_c = transition_c · S_{c-1} + increment_c, or S_{c-1} += transition_cᵀ · S_c."""
    transitions, states = transition.flatten(1, 2), increment.view(len(increment), -1, *increment.shape[-2:])
    if reverse:
        for step in range(len(states) - 1, 0, -1):
            states[step - 1].baddbmm_(transitions[step].mT, states[step])
    else:
        for step in range(1, len(states)):
            states[step].baddbmm_(transitions[step], states[step - 1])
    return increment


def summary(x: Inputs, first: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return the maps from the states before the chunks `starts [S]` to those behind the chunks `ends [S]`.

    Each map is affine, [transition, increment] `[S, K, G, D, D + E]`; the transition is 0 where a sequence begins
    behind `starts`.
    """
    parts = _parts(x, first, starts=True)
    assert parts.from_start is not None
    increment = torch.cat([torch.zeros_like(parts.transition), parts.k_out.mT @ parts.u], -1)
    increment[starts, ..., : increment.shape[-2]] = parts.from_start[starts]
    return _scan(parts.transition, increment)[ends]


def forward(x: Inputs, first: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs `[M, K, G, C, E]` and the states behind the chunks `[M, K, G, D, E]`."""
    parts = _parts(x, first, starts=start is not None)
    before, behind = states_before(parts, first, start)
    return parts.q_in @ before + parts.p @ (parts.u - parts.w @ before), behind


def _gradients_of_states(
    parts: _Parts, first: Tensor, d_out: Tensor, d_behind: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the states behind the chunks, and with `from_start` of those before first chunks.

    Both are `[M, K, G, D, E]`.
    """
    by_outputs = (parts.q_in - parts.p @ parts.w).mT @ d_out
    d_states = by_outputs.masked_fill(first.view(-1, 1, 1, 1, 1), 0).roll(-1, 0)
    if d_behind is not None:
        d_states += d_behind
    _scan(parts.transition, d_states, reverse=True)
    return d_states, None if parts.from_start is None else parts.from_start.mT @ d_states + by_outputs


def gradient_of_starts(x: Inputs, first: Tensor, d_out: Tensor) -> Tensor:
    """Return the gradients of the states before first chunks by the outputs alone, `[M, K, G, D, E]`."""
    _, d_start = _gradients_of_states(_parts(x, first, starts=True), first, d_out, None)
    assert d_start is not None
    return d_start


def backward(
    x: Inputs, first: Tensor, start: Tensor | None, d_out: Tensor, d_behind: Tensor | None
) -> tuple[Inputs, Tensor | None]:
    """Return the gradients of the inputs and of the states `start` (at first chunks).

    In place of `sums` stands the gradient of each log decay, a sum over all pairs of tokens with the decay in between:
    a difference of two such sums would have the error of larger numbers. `d_behind` are gradients of the states behind
    the chunks, without what later chunks make of them.
    """
    parts = _parts(x, first, starts=start is not None)
    before, _ = states_before(parts, first, start)
    n = parts.u - parts.w @ before
    d_states, d_start = _gradients_of_states(parts, first, d_out, d_behind)
    # (I + β A) N = β (v - k_in X): d_right is the gradient of the right side.
    d_n = parts.p.mT @ d_out + parts.k_out @ d_states
    d_right = torch.linalg.solve_triangular((x.beta * parts.a).mT, d_n, upper=True, unitriangular=True)
    d_beta_a = -(d_right @ n.mT).tril_(-1)
    d_beta = (d_right * (x.v - parts.k_in @ before)).sum(-1, keepdim=True)
    d_beta += (d_beta_a * parts.a).sum(-1, keepdim=True)
    d_v = x.beta * d_right
    d_p = d_out @ n.mT
    d_q, d_k, d_decay = gradients_of_products(x.q, x.k, x.sums, x.beta * d_beta_a, d_p.tril(-1))
    # P_ii has no decay.
    on_diagonal = d_p.diagonal(dim1=-2, dim2=-1)[..., None]
    # Decays up to a token scale what it reads of the state before; decays behind it what stays of its key.
    growth, to_end = factors_of(x)
    by_q, by_k = growth * (d_out @ before.mT), growth * -(d_v @ before.mT)
    by_write = to_end * (n @ d_states.mT)
    by_state = sum_from(x.q * by_q + x.k * by_k) + sum_before(x.k * by_write)
    by_state += parts.end.mT * (before * d_states).sum(-1)[..., None, :]
    d_decay = d_decay + (by_state.sum(-1, keepdim=True) if x.sums.shape[-1] == 1 else by_state)
    d_q = (d_q + by_q + on_diagonal * x.k).sum(2, keepdim=True)
    d_k = (d_k + by_k + by_write + on_diagonal * x.q).sum(2, keepdim=True)
    return Inputs(d_q, d_k, d_v, d_decay, d_beta), d_start
