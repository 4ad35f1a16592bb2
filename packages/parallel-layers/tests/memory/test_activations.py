"""Activation offload: gradients are the same bits, two layers' tensors stay on the device, no graph is kept alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from parallel_layers.memory.activations import ActivationOffload, _SavedTensor
from parallel_layers.memory.recompute import checkpoint
from parallel_layers.memory.savings import memory_savings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass
class Tables:
    """Constants of a batch in one object."""

    table: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, table: Tensor | Tables) -> Tensor:
        table = table.table if isinstance(table, Tables) else table
        return x + self.down(torch.tanh(self.up(x)) * table)


def stack(device: str) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(5)).to(device)


def run(layers: nn.ModuleList, x: Tensor, table: Tensor | Tables) -> Tensor:
    for layer in layers:
        x = layer(x, table)
    return x.square().sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("recompute", "in_object"),
    [
        (False, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_bits_and_two_layers_stay(
    device: str, recompute: bool, in_object: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, table = torch.randn(7, 16, device=device), torch.randn(7, 32, device=device)
    plain, offloaded = stack(device), stack(device)
    run(plain, x.requires_grad_(), table).backward()
    monkeypatch.setattr(ActivationOffload.__init__, "__defaults__", (1,))  # not the empty one of a checkpoint
    choice = "full" if recompute else None
    for module, forward, _ in memory_savings(dict(enumerate(offloaded)), recompute=choice, offload=True):
        module.forward = forward
    saved: list[weakref.ref[_SavedTensor]] = []
    own = _SavedTensor.__init__

    def remembered(self: _SavedTensor, *args: object) -> None:
        own(self, *args)  # type: ignore[arg-type]
        saved.append(weakref.ref(self))

    monkeypatch.setattr(_SavedTensor, "__init__", remembered)
    for _ in range(2):
        saved.clear()
        offloaded.zero_grad()
        loss = run(offloaded, x, Tables(table) if in_object else table)
        places = [place for place in (each() for each in saved) if place is not None]
        layers = list(dict.fromkeys(place.layer for place in places))
        assert len(layers) == 5
        # The table and the weights are not among them.
        assert {place.on_device.shape[-1] for place in places if place.on_device is not None} <= {16, 32}
        assert len(places) == (5 if recompute else 5 * 3)
        for number, layer in enumerate(layers):
            here = {place.on_device is not None for place in places if place.layer is layer}
            assert here == {number >= 3}
        del places, layers
        loss.backward()
        del loss
        gc.collect()
        assert not any(each() for each in saved)
        for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_without_gradients_nothing_is_kept() -> None:
    layers = stack("cpu")
    for module, forward, _ in memory_savings(dict(enumerate(layers)), offload=True):
        module.forward = forward
    with torch.no_grad():
        run(layers, torch.randn(7, 16), torch.randn(7, 32))
    assert checkpoint(lambda x: x, 3) == 3
