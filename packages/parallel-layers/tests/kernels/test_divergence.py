"""The kernels of distillation against `head.divergence` in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_layers.head import divergence as reference
from parallel_layers.head.chunked import LogitTransform
from parallel_layers.head.divergence import DIVERGENCES
from parallel_layers.kernels import divergence as kernels

TOKENS, ENTRIES = 5, 1300  # more than a block


def tiles(device: torch.device) -> tuple[list[kernels.Logits], list[Tensor], Tensor]:
    """Both sides for the kernels, their logits in fp64, and the derivative of the student's."""
    torch.manual_seed(0)
    sides, logits = [], []
    transforms = [(1.3, 0.0, torch.rand(TOKENS, device=device) + 0.5), (0.8, 4.0, 1.4)]
    for scale, softcap, temperature in transforms:
        raw = 3 * torch.randn(TOKENS, ENTRIES, device=device)
        sides.append(kernels.Logits(raw.clone(), scale, softcap, temperature))
        wide = temperature.double() if isinstance(temperature, Tensor) else temperature
        transform = LogitTransform(scale, softcap, wide)
        z, derivative = transform.apply_(raw.double(), slice(None))
        logits.append(z)
    return sides, logits, torch.as_tensor(derivative).expand(TOKENS, ENTRIES)


def test_statistics_merge_with_those_before(device: torch.device) -> None:
    sides, logits, _ = tiles(device)
    sides[0].products[1] = -math.inf
    sides[0].products[0, ::3] = -math.inf
    logits[0][1] = -math.inf
    logits[0][0, ::3] = -math.inf
    before = [3 * torch.randn(TOKENS, 40, dtype=torch.float64, device=device) for _ in sides]
    # Also as the first tile of a token, and after entries of -inf alone.
    expected = reference.logit_statistics(*(torch.cat(pair, 1) for pair in zip(before, logits, strict=True)))
    wider = torch.full((6, TOKENS + 2), 7.0, device=device)
    actual = wider[:, 1:-1]
    actual.copy_(reference.logit_statistics(*before))
    kernels.add_statistics_(actual, *sides)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-4)
    assert (wider[:, [0, -1]] == 7).all()
    alone = reference.empty_statistics(sides[0].products)
    kernels.add_statistics_(alone, *sides)
    torch.testing.assert_close(
        alone[:, 2:].double(), reference.logit_statistics(*logits)[:, 2:], rtol=2e-5, atol=2e-4
    )  # fmt: skip
    torch.testing.assert_close(alone[:2, 1].double(), torch.tensor([-math.inf, 0.0], dtype=torch.float64).to(device))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_sums_and_gradients(device: torch.device, name: str) -> None:
    divergence = DIVERGENCES[name](0.3)
    sides, logits, derivative = tiles(device)
    logsumexps = [x.logsumexp(1) for x in logits]
    terms = reference.logit_terms(
        *(x - lse[:, None] for x, lse in zip(logits, logsumexps, strict=True)), divergence
    )  # fmt: skip
    total, upstream = (torch.randn(TOKENS, dtype=torch.float64, device=device) for _ in range(2))
    rows = tuple(x.float() for x in (*logsumexps, total, upstream))
    for dtype, relative in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        actual = kernels.product_gradients(*sides, rows, divergence, dtype)
        expected = (terms.c - terms.q * total[:, None]) * upstream[:, None] * derivative
        assert actual.dtype == dtype
        scale = expected.abs().amax(dim=1, keepdim=True)
        assert ((actual.double() - expected).abs() <= relative * scale).all()
    if divergence.mixes:
        sums = torch.ones(2, TOKENS, device=device)
        kernels.add_mixture_sums_(sums, *sides, torch.stack(rows[:2]), divergence)
        of_teacher = divergence.teacher * terms.p * (terms.log_p - terms.log_m)
        of_student = divergence.student * terms.q * (terms.log_q - terms.log_m)
        exact = torch.stack(((of_teacher + of_student).sum(1), terms.c.sum(1)))
        torch.testing.assert_close(sums.double() - 1, exact, rtol=1e-5, atol=1e-5)


def test_what_is_nan_and_what_is_not(device: torch.device) -> None:
    """NaN reaches its token alone; logits of -inf in both sides are harmless."""
    sides, _, _ = tiles(device)
    sides[0].products[1, 3] = math.nan
    for side in sides:
        side.products[2, ::2] = -math.inf
    # A soft-cap would turn -inf into a finite logit.
    sides = [side._replace(softcap=0.0) for side in sides]
    statistics = reference.empty_statistics(sides[0].products)
    kernels.add_statistics_(statistics, *sides)
    logsumexps, *divergences = reference.finish_pair_statistics(statistics)
    nan = [False, True, False, False, False]
    assert all(value.isnan().tolist() == nan for value in divergences)
    total = torch.ones(TOKENS, device=device)
    for make in DIVERGENCES.values():
        divergence = make(0.3)
        rows = (*logsumexps, total, total)
        gradient = kernels.product_gradients(*sides, rows, divergence, torch.float32)
        assert gradient.isnan().any(dim=1).tolist() == nan
        if divergence.mixes:
            sums = torch.zeros(2, TOKENS, device=device)
            kernels.add_mixture_sums_(sums, *sides, logsumexps, divergence)
            assert sums.isnan().any(dim=0).tolist() == nan
