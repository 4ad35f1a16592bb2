"""Divergences between a teacher's and a student's distributions, in tiles of plain torch.

With the teacher's probabilities p, the student's q, and their mixture m = s p + (1 - s) q, every divergence here is

    D = sum_j  a p_j log(p_j / m_j) + b q_j log(q_j / m_j)

With the mixture's share of the student, r_j = (1 - s) q_j / m_j, the gradient of the student's logits z is

    dD/dz_j = c_j - q_j sum_k c_k        c_j = q_j dD/dq_j = b q_j (log(q_j / m_j) + 1 - r_j) - a p_j r_j

For s = 0 and s = 1, D and the sum of c follow from statistics that one pass over the vocabulary collects, six numbers a
token (rows of a `[6, T]` tensor), of the teacher's logits x and the student's z:

    max x    sum_j P_j    sum_j P_j (X_j - Z_j)    max z    sum_j Q_j    sum_j Q_j (Z_j - X_j)

where X = x - max x, P = e^X, Z = z - max z and Q = e^Z. Other mixtures need a second pass.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, N sets to merge.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.head.chunked import NEGLIGIBLE
from parallel_layers.head.sides import Gradients, Pair, Tile, add_gradients, tiles_of
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
    """What determines the gradient of the student's logits, each `[T]`: log-sum-exps, sum of c, upstream gradient."""

    teacher: Tensor
    student: Tensor
    total: Tensor
    upstream: Tensor


def pair_statistics(pair: Pair) -> Tensor:
    """Return the statistics `[6, T]` of this rank's logits."""
    merged = empty_statistics(pair.student.hidden_TH)
    for tile in tiles_of(pair):
        statistics = logit_statistics(*tile.logits)
        merged[:, tile.tokens] = merge_pair_statistics(torch.stack((merged[:, tile.tokens], statistics)))
    return merged


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


def _terms(tile: Tile, constants: Constants, divergence: Divergence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `(log p, log q, log m, r)` of a tile; the mixture must mix."""
    log_p, log_q = (
        logits.sub_(logsumexp[tile.tokens, None]) for logits, logsumexp in zip(tile.logits, constants[:2], strict=True)
    )
    if not divergence.mixes:
        unit = torch.full((), 1.0 - divergence.share, dtype=log_q.dtype, device=log_q.device)
        return log_p, log_q, log_q if divergence.share == 0.0 else log_p, unit
    scaled_q = log_q + math.log1p(-divergence.share)
    log_m = torch.logaddexp(log_p + math.log(divergence.share), scaled_q).clamp_(min=NEGLIGIBLE)
    return log_p, log_q, log_m, scaled_q.sub_(log_m).exp_()


def _student_terms(
    log_p: Tensor, log_q: Tensor, log_m: Tensor, r: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """Return `(q, c)` of a tile, in new tensors."""
    q = log_q.exp()
    c = torch.zeros_like(q)
    if divergence.student:
        c += divergence.student * q * (log_q.clamp(min=NEGLIGIBLE) - log_m + (1.0 - r))
    if divergence.teacher:
        c -= divergence.teacher * log_p.exp() * r
    return q, c


def mixture_sums(pair: Pair, constants: Constants, divergence: Divergence) -> Tensor:
    """Return this rank's part of D and of the sum of c, `[2, T]`, for a mixture that mixes."""
    sums = constants.student.new_zeros(2, len(constants.student))
    for tile in tiles_of(pair):
        log_p, log_q, log_m, r = _terms(tile, constants, divergence)
        q, c = _student_terms(log_p, log_q, log_m, r, divergence)
        p = log_p.exp()
        terms = divergence.teacher * p * (log_p.clamp(min=NEGLIGIBLE) - log_m)
        terms += divergence.student * q * (log_q.clamp(min=NEGLIGIBLE) - log_m)
        sums[0, tile.tokens] += terms.sum(dim=1)
        sums[1, tile.tokens] += c.sum(dim=1)
    return sums


def pair_gradients(pair: Pair, constants: Constants, divergence: Divergence, out: Gradients) -> None:
    """Add the gradients of the student's hidden states and rows."""

    def gradient(tile: Tile) -> Tensor:
        q, c = _student_terms(*_terms(tile, constants, divergence), divergence)
        return c.sub_(q.mul_(constants.total[tile.tokens, None])).mul_(constants.upstream[tile.tokens, None])

    add_gradients(pair, gradient, out)
