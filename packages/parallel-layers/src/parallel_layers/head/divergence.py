"""Divergences between a teacher's and a student's distributions, in tiles of plain torch.

With the teacher's probabilities p, the student's q, and their mixture m = s p + (1 - s) q, every divergence here is

    D = sum_j  a p_j log(p_j / m_j) + b q_j log(q_j / m_j)

With the mixture's share of the student, r_j = (1 - s) q_j / m_j, the gradient of the student's logits z is

    dD/dz_j = c_j - q_j sum_k c_k        c_j = q_j dD/dq_j = b q_j (log(q_j / m_j) + 1 - r_j) - a p_j r_j

For s = 0 and s = 1, D and the sum of c follow from statistics that one pass over the vocabulary collects, six numbers a
token (rows of a `[6, T]` tensor), of the teacher's logits x and the student's z:

    max x    sum_j P_j    sum_j P_j (X_j - Z_j)    max z    sum_j Q_j    sum_j Q_j (Z_j - X_j)

where X = x - max x, P = e^X, Z = z - max z and Q = e^Z. Other mixtures need a second pass, or tiles with
all entries of a token.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, N sets to merge.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.head.chunked import NEGLIGIBLE
from parallel_layers.head.sides import Gradients, Pair, Side, Tile, add_gradients, tiles_of
from parallel_layers.kernels import divergence as kernels
from parallel_layers.kernels.runtime import use_triton
from parallel_layers.module.autocast import wide


class Divergence(NamedTuple):
    """The weights a and b and the teacher's share s of the mixture; see the module's docstring."""

    teacher: float
    student: float
    share: float

    @property
    def mixes(self) -> bool:
        """Whether the mixture is neither of the two distributions."""
        return 0.0 < self.share < 1.0


DIVERGENCES: dict[str, Callable[[float], Divergence]] = {
    "forward_kl": lambda _: Divergence(1.0, 0.0, 0.0),
    "reverse_kl": lambda _: Divergence(0.0, 1.0, 1.0),
    "jensen_shannon": lambda share: Divergence(share, 1.0 - share, share),
    "skewed_forward_kl": lambda share: Divergence(1.0, 0.0, share),
    "skewed_reverse_kl": lambda share: Divergence(0.0, 1.0, 1.0 - share),
}
"""Divergences by name, each a function of its `mixture`; see `linear_distillation`."""


class Constants(NamedTuple):
    """The numbers of each token, `[T]`, from which the backward computes the gradient of the student's logits.

    They are the log-sum-exps of the teacher and of the student, the sum of c, and the upstream gradient.
    """

    teacher: Tensor
    student: Tensor
    total: Tensor
    upstream: Tensor


def pair_statistics(pair: Pair) -> Tensor:
    """Return the statistics `[6, T]` of this rank's logits."""
    statistics = empty_statistics(pair.student.hidden_TH)
    for tile in tiles_of(pair):
        _add_statistics_(statistics[:, tile.tokens], tile, pair)
    return statistics


def _add_statistics_(statistics_6T: Tensor, tile: Tile, pair: Pair) -> None:
    if use_triton(*tile.products):
        kernels.add_statistics_(statistics_6T, *_kernel_sides(tile, pair))
    else:
        parts = torch.stack((statistics_6T, logit_statistics(*tile.logits(pair)[0])))
        statistics_6T.copy_(merge_pair_statistics(parts))


def empty_statistics(hidden_TH: Tensor) -> Tensor:
    """Return the statistics `[6, T]` of an empty set of entries."""
    statistics = hidden_TH.new_zeros(6, len(hidden_TH), dtype=wide(hidden_TH.dtype))
    statistics[::3] = -math.inf
    return statistics


def logit_statistics(x_TV: Tensor, z_TV: Tensor) -> Tensor:
    """Return the statistics `[6, T]` of the teacher's logits x and the student's z; overwrites them."""
    if x_TV.shape[1] == 0:
        return empty_statistics(z_TV)
    maxima, shifted = [], []
    for logits in (x_TV, z_TV):
        maxima.append(logits.amax(dim=1))
        # Among logits of -inf alone any finite shift gives sums of 0.
        shifted.append(logits.sub_(maxima[-1].masked_fill(maxima[-1] == -math.inf, 0.0)[:, None]))
    rows = []
    for maximum, logits, other in zip(maxima, shifted, reversed(shifted), strict=True):
        weights = logits.exp()
        # An entry without weight adds 0, although its difference may be infinite or NaN.
        moment = torch.where(weights == 0, 0.0, weights * (logits - other)).sum(dim=1)
        rows += [maximum, weights.sum(dim=1), moment]
    return torch.stack(rows)


def merge_pair_statistics(parts_N6T: Tensor) -> Tensor:
    """Merge the statistics of N disjoint sets, in order, into their union's statistics: `[N, 6, T] -> [6, T]`."""
    maxima = parts_N6T[:, ::3]
    merged = maxima.amax(dim=0)
    shifts = torch.where(maxima == -math.inf, 0.0, maxima - merged)
    factors = torch.where(maxima == -math.inf, 0.0, shifts.exp())
    sums = (parts_N6T[:, 1::3] * factors).sum(dim=0)
    moments = (parts_N6T[:, 2::3] + (shifts - shifts.flip(1)) * parts_N6T[:, 1::3]) * factors
    moments = torch.where(factors == 0, 0.0, moments).sum(dim=0)
    return torch.stack((merged, sums, moments), dim=1).flatten(0, 1)


def finish_pair_statistics(statistics_6T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exps, KL(p, q) and KL(q, p), the first of both sides: each `[2, T]` but for the last two."""
    maxima, sums, moments = statistics_6T.view(2, 3, -1).unbind(dim=1)
    logs = sums.log()
    forward_kl, reverse_kl = moments / sums - logs + logs.flip(0)
    return maxima + logs, forward_kl, reverse_kl


def _kernel_sides(tile: Tile, pair: Pair) -> tuple[kernels.Logits, kernels.Logits]:
    def of(side: Side, products: Tensor) -> kernels.Logits:
        scale, softcap, temperature = side.transform
        if isinstance(temperature, Tensor):
            temperature = temperature[tile.tokens]
        return kernels.Logits(products, scale, softcap, temperature)

    return of(pair.teacher, tile.products[0]), of(pair.student, tile.products[1])


class _Terms(NamedTuple):
    """The probabilities of a tile, their logarithms (at least `NEGLIGIBLE`), that of the mixture, and c."""

    p: Tensor
    q: Tensor
    log_p: Tensor
    log_q: Tensor
    log_m: Tensor
    c: Tensor


def logit_terms(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> _Terms:
    """Return the terms of a tile of log-probs."""
    p, q = log_p.exp(), log_q.exp()
    # What multiplies a probability of 0 must be finite.
    finite_p, finite_q = log_p.clamp(min=NEGLIGIBLE), log_q.clamp(min=NEGLIGIBLE)
    c = torch.zeros_like(q)
    if divergence.mixes:
        scaled_q = finite_q + math.log1p(-divergence.share)
        log_m = torch.logaddexp(finite_p + math.log(divergence.share), scaled_q)
        r: Tensor | float = scaled_q.sub_(log_m).exp_()
    else:
        log_m, r = (log_q, 1.0) if divergence.share == 0.0 else (log_p, 0.0)
    if divergence.student:
        c += divergence.student * q * (finite_q - log_m + (1.0 - r))
    if divergence.teacher:
        c -= divergence.teacher * p * r
    return _Terms(p, q, finite_p, finite_q, log_m, c)


def _log_probs(tile: Tile, pair: Pair, logsumexps_2T: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return both sides' log-probs, and the derivative of the student's logits by the raw products."""
    (x, z), derivative = tile.logits(pair)
    return x.sub_(logsumexps_2T[0, :, None]), z.sub_(logsumexps_2T[1, :, None]), derivative


def mixture_sums(pair: Pair, logsumexps_2T: Tensor, divergence: Divergence) -> Tensor:
    """Return this rank's part of D and of the sum of c, `[2, T]`, for a mixture that mixes."""
    sums = torch.zeros_like(logsumexps_2T)
    for tile in tiles_of(pair):
        _add_mixture_sums_(sums[:, tile.tokens], tile, pair, logsumexps_2T[:, tile.tokens], divergence)
    return sums


def _add_mixture_sums_(sums_2T: Tensor, tile: Tile, pair: Pair, logsumexps_2T: Tensor, divergence: Divergence) -> None:
    if use_triton(*tile.products):
        kernels.add_mixture_sums_(sums_2T, *_kernel_sides(tile, pair), logsumexps_2T, divergence)
        return
    log_p, log_q, _ = _log_probs(tile, pair, logsumexps_2T)
    terms = logit_terms(log_p, log_q, divergence)
    of_teacher = divergence.teacher * terms.p * (terms.log_p - terms.log_m)
    of_student = divergence.student * terms.q * (terms.log_q - terms.log_m)
    sums_2T += torch.stack(((of_teacher + of_student).sum(dim=1), terms.c.sum(dim=1)))


def mixture_by_tokens(
    pair: Pair, divergence: Divergence, rows_of_rank: int, merge: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of both sides and the result of `mixture_sums`, `[2, T]` each, in one pass.

    A tile has all of this rank's entries of some tokens, see `tiles_of`; `merge` merges the statistics of the ranks.
    """
    hidden = pair.student.hidden_TH
    logsumexps = hidden.new_empty(2, len(hidden), dtype=wide(hidden.dtype))
    sums = torch.zeros_like(logsumexps)
    for tile in tiles_of(pair, rows_of_rank=rows_of_rank):
        statistics = empty_statistics(tile.operands[0])
        # The functions in torch overwrite the products.
        copy = tile if use_triton(*tile.products) else tile._replace(products=tuple(x.clone() for x in tile.products))
        _add_statistics_(statistics, copy, pair)
        of_tile = logsumexps[:, tile.tokens]
        of_tile.copy_(finish_pair_statistics(merge(statistics))[0])
        _add_mixture_sums_(sums[:, tile.tokens], tile, pair, of_tile, divergence)
    return logsumexps, sums


def pair_gradients(pair: Pair, constants: Constants, divergence: Divergence, out: Gradients) -> None:
    """Add the gradients of the student's hidden states and rows."""

    def gradient(tile: Tile) -> Tensor:
        rows = Constants(*(x[tile.tokens] for x in constants))
        if use_triton(*tile.products):
            dtype = tile.operands[1].dtype
            return kernels.product_gradients(*_kernel_sides(tile, pair), rows, divergence, dtype)
        log_p, log_q, derivative = _log_probs(tile, pair, torch.stack(rows[:2]))
        terms = logit_terms(log_p, log_q, divergence)
        dz_TV = terms.c.sub_(terms.q.mul_(rows.total[:, None])).mul_(rows.upstream[:, None])
        return dz_TV.mul_(derivative)

    add_gradients(pair, gradient, out)
