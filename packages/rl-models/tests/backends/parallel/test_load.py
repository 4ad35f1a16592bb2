"""Stages of unequal numbers of layers: they learn as one rank does, and what they save goes on anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import PipelineOptions
from rl_models import Actor, Batch, Critic, OptimizerOptions
from rl_models.losses import LossTerms

VOCAB = 61
LOSSES: dict[type, Any] = {
    Actor: lambda inputs: LossTerms(-inputs.log_probs + 0.01 * inputs.entropy),
    Critic: lambda inputs: LossTerms((inputs.values - 1).square()),
}


@pytest.fixture(scope="module")
def path(tiny: Callable[..., Path]) -> Path:
    """A language model: a critic finds no head of its own there, and one that it does not read."""
    return tiny("llama", num_hidden_layers=4)


def load(group: ProcessGroup, path: Path, kind: Any, dims: ParallelDims, split: list[int] | None) -> Any:
    options = {} if split is None else {"pipeline": PipelineOptions(split=split)}
    mesh = mesh_of(dims)
    optimizer = OptimizerOptions(learning_rate=1e-2)
    return kind.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", optimizer=optimizer, **options)


def update(worker: Any) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(3)
    rows: list[Tensor] = [torch.randint(VOCAB, (length,), generator=generator) for length in (12, 1, 5, 7)]
    result = worker.update(Batch.from_sequences(rows), LOSSES[type(worker)])
    return result["loss"], result["grad_norm"]


def learn(
    group: ProcessGroup, path: Path, kind: Any, dims: ParallelDims, split: list[int] | None, root: Path
) -> list[tuple[float, float]]:
    worker = load(group, path, kind, dims, split)
    results = [update(worker) for _ in range(2)]
    worker.save_training(root, step=2)
    return [*results, update(worker)]


def go_on(
    group: ProcessGroup, path: Path, kind: Any, dims: ParallelDims, split: list[int] | None, root: Path
) -> tuple[float, float]:
    worker = load(group, path, kind, dims, split)
    assert worker.load_training(root).step == 2
    return update(worker)


@pytest.mark.parametrize("kind", [pytest.param(Actor, marks=pytest.mark.slow), Critic])
def test_learns_and_goes_on_as_one_rank_does(ranks: RankPool, path: Path, tmp_path: Path, kind: Any) -> None:
    one, two = (ParallelDims(), None), (ParallelDims(pp=2), [1, 3])
    (expected,) = ranks.run(learn, path, kind, *one, tmp_path / "one", world=1)
    for results in ranks.run(learn, path, kind, *two, tmp_path / "two", world=2, timeout=100):
        assert [value for pair in results for value in pair] == pytest.approx(
            [value for pair in expected for value in pair], rel=1e-5, abs=1e-5
        )
    other = (ParallelDims(pp=2), [3, 1])
    for grid, world, root in ((one, 1, "two"), (two, 2, "one"), (other, 2, "two")):
        for result in ranks.run(go_on, path, kind, *grid, tmp_path / root, world=world, timeout=100):
            assert result == pytest.approx(expected[2], rel=1e-5, abs=1e-5)
