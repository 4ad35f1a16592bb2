"""The draws of responses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_models.generation import draw
from parallel_models.generation.options import GenerationOptions


def test_a_seed_gives_the_numbers_that_it_always_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that go on with a newer release draw the same responses; data-parallel ranks differ."""
    prompts: Any = [None, None]
    monkeypatch.setattr(draw, "_draw", lambda engine, rows, uniforms, *_: uniforms)
    for dp, seed in ((0, 2902805962516761537), (1, 2794019225575547101)):
        dims = SimpleNamespace(cp=1)
        grid: Any = SimpleNamespace(dims=dims, device=torch.device("cpu"), data_mesh=None, group=lambda _: None)
        grid.rank = {"dp": dp, "cp": 0}.get
        engine: Any = SimpleNamespace(grid=grid)
        uniforms: Any = draw.draw_responses(engine, prompts, GenerationOptions(3, n=2), 99)
        assert torch.equal(uniforms, torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)))
