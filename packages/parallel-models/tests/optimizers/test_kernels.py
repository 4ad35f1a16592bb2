"""The kernels of moments in low precision against torch: on a GPU, and on a CPU in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from ckpt import Block
from parallel_layers.kernels import HAS_TRITON
from parallel_models.optimizers import kernels
from parallel_models.optimizers.adamw import AdamW
from parallel_models.optimizers.interface import Moments, OptimizerOptions
from parallel_models.optimizers.moments import STORAGES, levels
from parallel_models.optimizers.muon import Muon
from parallel_models.optimizers.rounding import coordinates
from parallel_models.optimizers.rules import Rule, Weight

SHAPES = [(5, 1000), (3, 256), (300,), (7, 96), (2, 3, 130), (1, 1)]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "interpreter"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    return torch.device("cpu")


def values(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Numbers of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator) * 10 ** (-4 * torch.rand(shape, generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, found).to(device)


def adamw(masters: list[Tensor], moments: Moments) -> Rule:
    options = OptimizerOptions(1e-2, weight_decay=0.1, moments=moments)
    places = {
        master: coordinates(Block.whole(f"w{n}", tuple(master.shape)), master.device)
        for n, master in enumerate(masters)
    }
    return AdamW({0.1: masters}, options, places, None)


def codes_of(rule: Rule, master: Tensor) -> list[Tensor]:
    return [part for parts in rule.moments_of(master).values() for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
def test_a_step_is_torchs(
    device: torch.device, moments: Moments, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From equal states one step gives equal numbers, and codes that are the same but for ties of the rounding."""
    mine = [values(shape, n, device) for n, shape in enumerate(SHAPES)]
    its = [master.clone() for master in mine]
    copies = [torch.empty_like(master, dtype=torch.bfloat16) for master in mine]
    ours, torchs = adamw(mine, moments), adamw(its, moments)
    differing = count = 0
    for step in range(3):
        given = [values(shape, 100 * step + n, device).to(dtype) for n, shape in enumerate(SHAPES)]
        monkeypatch.setattr("parallel_models.optimizers.adamw.supports", lambda *_: True)
        ours.step(1e-2, {m: Weight(g, c) for m, g, c in zip(mine, given, copies, strict=True)})
        monkeypatch.setattr("parallel_models.optimizers.adamw.supports", lambda *_: False)
        torchs.step(1e-2, {m: Weight(g, None) for m, g in zip(its, given, strict=True)})
        for one, two, copy in zip(mine, its, copies, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
            assert ((copy.float() - one).abs() <= one.abs() * 2.0 ** (-8 if device.type == "cuda" else -7)).all()
            for part, other in zip(codes_of(ours, one), codes_of(torchs, two), strict=True):
                if part.dtype == torch.float32:
                    torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-8)  # one number is a block of its own
                    continue
                bits = part.view(torch.int16) if part.dtype == torch.bfloat16 else part
                others = other.view(torch.int16) if part.dtype == torch.bfloat16 else other
                gap = (bits.int() - others.int()).abs()
                assert int(gap.max()) <= 1
                differing, count = differing + int(gap.sum()), count + gap.numel()
                part.copy_(other)  # the next step begins from equal states
            one.copy_(two)
    assert differing <= count * 2e-3


@pytest.mark.parametrize("moments", ["int8", "bfloat16", "float32"])
def test_momentum_is_torchs(device: torch.device, moments: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    master = values((5, 1000), 0, device)
    places = {master: coordinates(Block.whole("w", (5, 1000)), device)}
    found = {}
    for ours in (True, False):
        monkeypatch.setattr("parallel_models.optimizers.muon.supports", lambda *_, ours=ours: ours)
        options = OptimizerOptions(algorithm="muon", moments=moments)
        rule = Muon({master: master}, None, options, places, None)  # type: ignore[arg-type]
        gradient = values((5, 1000), 1, device)
        for _ in range(2):
            rule.steps[master] += 1
            ((chunk,),) = rule.visit([master])
            rule._average(chunk, gradient)
        found[ours] = gradient, rule.storages["momentum_buffer"].read(rule.moments_of(master)["momentum_buffer"])
    largest = found[False][1].abs().max()
    for one, two in zip(found[True], found[False], strict=True):
        # A tie of the rounding moves a number by a level, at most a fourteenth of it.
        close = torch.isclose(one, two, rtol=1e-5, atol=1e-6 * float(largest))
        assert float(close.double().mean()) > 0.995
        torch.testing.assert_close(one, two, rtol=0.1, atol=1e-6 * float(largest))


@pytest.mark.parametrize("square", [False, True])
def test_every_level_is_read_and_stored_again(device: torch.device, square: bool) -> None:
    """All 256 codes, and magnitudes at, beside and between all levels, against the table."""
    table = levels(square).double()
    between = torch.cat([table, (table[1:] + table[:-1]) / 2, table[1:] * 0.9999, table[1:] * 1.0001, table[:1] * 0.1])
    between = between.clamp(max=1.0).float()
    rows = torch.cat([between, torch.zeros(-len(between) % 255)]).view(-1, 255)
    shares = torch.cat([torch.ones(len(rows), 1), rows], 1).to(device)  # the largest of each block is 1
    storage = STORAGES["int8"](square)
    slot = "exp_avg_sq" if square else "exp_avg"
    # With a gradient g, and betas 0, the moments are g and g^2.
    gradient = shares.sqrt() if square else shares
    master = torch.zeros_like(shares)
    options = OptimizerOptions(0.0, (0.0, 0.0), moments="int8")
    places = {master: coordinates(Block.whole("w", tuple(shares.shape)), device)}
    rule = AdamW({0.0: [master]}, options, places, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel_models.optimizers.adamw.supports", lambda *_: True)
        rule.step(0.0, {master: Weight(gradient, None)})
    stored = storage.read(rule.moments_of(master)[slot]).double().cpu()
    wanted = shares.double().cpu()
    lower = (torch.bucketize(wanted.clamp(min=float(table[0])), table, right=True) - 1).clamp(0, 254)
    below, above = table[lower], table[lower + 1]
    # The square of a rounded root may lie on the other side of a level.
    slack = 1e-6 * wanted.abs() + 1e-12
    near = (stored - below).abs().minimum((stored - above).abs()) <= slack
    beside = (wanted - below <= 10 * slack) | (above - wanted <= 10 * slack)
    assert (near | (beside & ((stored - wanted).abs() <= 1.5 * (above - below) + slack))).all()
    assert torch.equal(stored[:, 0], torch.ones(len(rows), dtype=torch.float64))


def test_values_that_the_kernels_do_not_take_go_to_torch() -> None:
    assert not kernels.supports(torch.ones(2), torch.ones(2))
