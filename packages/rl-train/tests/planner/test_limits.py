"""The grids and the savings that fit devices of a given memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import measure

from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, OptimizerOptions
from rl_train.options.fields import parse_recompute
from rl_train.planner.limits import fitting
from rl_train.planner.memory import MemoryOptions
from rl_train.planner.models import savings_text
from rl_train.planner.plan import plan_memory


def test_grids_that_fit_have_the_fewest_ranks(model: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(), tokens=4096)
    alone = plan_memory(model, options, role="causal_lm", trained=True)[0].total
    (only,) = fitting(Checkpoint(model), options, alone, critic=False, reference=False)
    assert only.options == options
    # What is given stays, and nothing is added to it.
    given = replace(options, recompute=(0,))
    grids = [
        found.options for found in fitting(Checkpoint(model), given, int(0.75 * alone), critic=False, reference=False)
    ]
    assert grids
    assert {(entry.dims.world_size, entry.recompute) for entry in grids} == {(2, (0,))}
    several = fitting(Checkpoint(model), options, alone, ranks=4, critic=False, reference=False)
    assert {found.options.dims.world_size for found in several} == {4}


@pytest.mark.slow
def test_the_savings_that_cost_least_time_are_chosen(ranks: RankPool, model: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(), tokens=1024, dtype=torch.float32, device="cpu")

    def peak(**savings: Any) -> int:
        return plan_memory(model, replace(options, **savings), role="causal_lm", trained=True)[0].total

    def chosen(limit: int) -> MemoryOptions:
        (found,) = fitting(Checkpoint(model), options, limit, critic=False, reference=False)
        assert found.peak <= limit
        return found.options

    assert chosen(peak()).recompute is None
    # The fewest layers that suffice, of which one is cheaper than all MLPs, and three are not.
    assert chosen(peak() - 1).recompute == (0,)
    assert chosen(peak(recompute=(0,)) - 1).recompute == (0, 1)
    assert chosen(peak(recompute="selective")).recompute in ("selective", (0, 1))
    assert chosen(peak(recompute="full")).recompute == "full"
    least = chosen(peak(recompute="full", offload_activations=True))
    assert (least.recompute, least.offload_activations, least.tiled_mlp) == ("full", True, None)
    least = chosen(peak(recompute="full", offload_activations=True, tiled_mlp=8))
    assert (least.recompute, least.offload_activations, least.tiled_mlp) == ("full", True, 8)
    # Then the optimizer moves to the host, and nothing more is saved than this needs.
    away = chosen(peak(recompute="full", offload_activations=True, tiled_mlp=8) - 1)
    assert away.optimizer.offload
    assert chosen(peak(optimizer=OptimizerOptions(offload=True))).optimizer.offload is False, "recomputation is faster"
    assert fitting(Checkpoint(model), options, 1000, ranks=1, critic=False, reference=False) == []
    # The chosen options fit when they run.
    limit = peak(recompute=(0,))
    (measured,) = ranks.run(measure, model, Actor, chosen(limit), world=1, timeout=120)
    assert measured == pytest.approx(limit, rel=0.1)


@pytest.mark.slow
def test_the_experts_of_a_mixture_are_shared_out_to_fit(models: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(), tokens=256, device="cpu")
    whole = plan_memory(models / "mixture", options, role="causal_lm", trained=True)[0]
    given = replace(options, recompute="full")
    found = list(fitting(Checkpoint(models / "mixture"), given, int(0.7 * whole.total), critic=False, reference=False))
    assert {entry.options.dims.world_size for entry in found} == {2}
    assert {entry.options.dims.ep for entry in found} == {1, 2}
    with pytest.raises(ValueError, match="ep=2 is for a mixture of experts, which llama is not"):
        plan_memory(
            models / "llama", MemoryOptions(dims=ParallelDims(dp=2, ep=2), tokens=256), role="causal_lm", trained=True
        )


def test_savings_are_printed_as_the_command_line_reads_them() -> None:
    options = MemoryOptions(
        dims=ParallelDims(), tokens=1, recompute=(5, 0, 2, 1), optimizer=OptimizerOptions(offload=True)
    )
    assert savings_text(options) == "--recompute 0-2,5 --optimizer.offload"
    assert parse_recompute("0-2,5") == (0, 1, 2, 5)
