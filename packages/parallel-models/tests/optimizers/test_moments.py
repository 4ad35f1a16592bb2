"""The storage of moments: exact round trips, bounded errors, rounding that is right on average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_models.optimizers.moments import BLOCK, STORAGES, MomentTensors, levels

LOW = [name for name, storage in STORAGES.items() if not storage.exact]


def stored(name: str, values: Tensor, square: bool, draw: Tensor | None = None) -> tuple[MomentTensors, Tensor]:
    """The storage of values, and the values that it gives back."""
    storage = STORAGES[name](square)
    parts = tuple(torch.zeros_like(part, device="cpu") for part in storage.empty(*values.shape, torch.float32))
    assert not storage.read(parts).any()
    storage.write(parts, values, draw)
    return parts, storage.read(parts).clone()


def random_values(rows: int, columns: int, square: bool) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 1e-3
    return values.square() if square else values


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 255), (2, 256), (3, 1000)])
@pytest.mark.parametrize("name", STORAGES)
def test_what_was_stored_is_stored_again_bit_for_bit(name: str, shape: tuple[int, int], square: bool) -> None:
    parts, values = stored(name, random_values(*shape, square), square)
    again, _ = stored(name, values, square)
    assert all(torch.equal(mine, its) for mine, its in zip(parts, again, strict=True))
    # Its bytes are those that the plan counts.
    nbytes = sum(part.nbytes for part in parts)
    assert nbytes == pytest.approx(shape[0] * shape[1] * STORAGES[name].bytes_per_element, abs=4 * shape[0])


@pytest.mark.parametrize("square", [False, True])
def test_8_bits_are_within_half_a_level(square: bool) -> None:
    values = random_values(5, 8 * BLOCK, square)
    _, found = stored("int8", values, square)
    scales = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    gap = levels(square).diff().max() / 2
    smallest = levels(square)[0] if square else 0.0
    assert ((found - values).view(-1, BLOCK).abs() <= scales * max(gap, smallest) * 1.001).all()
    # The largest of each block is exact.
    assert torch.equal(found.view(-1, BLOCK).abs().amax(1, keepdim=True), scales)


@pytest.mark.parametrize("value", [0.3, 0.0123, 4.5e-6])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("name", LOW)
def test_rounding_is_right_on_average(name: str, square: bool, value: float) -> None:
    values = torch.full((256, BLOCK), value)
    values[:, 0] = 1.0
    # Each number that can be drawn, once.
    _, found = stored(name, values, square, torch.arange(1 << 16).view(256, BLOCK))
    others = found[:, 1:].double()
    assert len(others.unique()) == 2
    assert float(others.mean()) == pytest.approx(value, rel=5e-4)


def test_a_square_is_never_rounded_to_zero() -> None:
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0] = 1.0
    for draw in (None, torch.zeros(1, BLOCK, dtype=torch.int64)):
        _, found = stored("int8", values, True, draw)
        assert (found > 0).all()
