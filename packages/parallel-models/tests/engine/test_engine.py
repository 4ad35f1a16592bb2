"""The engine's own methods, apart from any model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parallel_models.engine.engine import Engine


def test_dropout_has_the_seeds_that_it_always_had() -> None:
    """A resumed run counts its updates on, and draws what it would have drawn."""
    module = nn.Dropout(0.5).eval()
    grid = SimpleNamespace(rank={"dp": 2, "cp": 1}.get, device=torch.device("cpu"))
    options = SimpleNamespace(lora=SimpleNamespace(seed=5))
    engine: Any = SimpleNamespace(adapter_dropouts=lambda: [module], updates=3, options=options, grid=grid)
    before = torch.get_rng_state()
    with Engine.dropout(engine):
        assert module.training
        assert torch.initial_seed() == 1494239983
    assert engine.updates == 4
    assert not module.training
    assert torch.equal(torch.get_rng_state(), before)
