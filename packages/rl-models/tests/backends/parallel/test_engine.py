"""Options `tp_invariant` and `deterministic`: the same bits on every grid and in every batch; at every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

LENGTHS = (11, 1, 17, 6, 2, 9)


class Case(NamedTuple):
    """A grid, and further options of `from_pretrained`."""

    dims: ParallelDims
    options: dict[str, Any]


GRIDS = [
    Case(ParallelDims(), {"max_tokens_per_micro_batch": 17}),
    Case(ParallelDims(tp=2), {"sequence_parallel": False, "max_tokens_per_micro_batch": 20}),
    Case(ParallelDims(tp=4), {"max_tokens_per_micro_batch": 20}),
]
MORE_GRIDS = [
    Case(ParallelDims(dp=2, tp=2), {"recompute": "full"}),
    Case(ParallelDims(tp=2), {}),
    Case(ParallelDims(cp=2, tp=2), {"max_tokens_per_micro_batch": 24}),
    Case(ParallelDims(pp=2, tp=2), {"max_tokens_per_micro_batch": 18}),
]


@pytest.fixture(scope="module")
def folders(tiny: Callable[..., Path]) -> dict[str, Path]:
    return {"actor": tiny("llama"), "critic": tiny("critic")}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    return Batch.from_sequences(rows, weight=[torch.randn(length, generator=generator) for length in LENGTHS])


def load(kind: Any, group: ProcessGroup | None, path: Path, case: Case, **options: Any) -> Any:
    """An actor or a critic on the first ranks of the pool."""
    mesh = None if group is None else mesh_of(case.dims)
    return kind.from_pretrained(path, dims=case.dims, mesh=mesh, device="cpu", **case.options, **options)


def score(group: ProcessGroup | None, folders: dict[str, Path], case: Case) -> dict[int, Tensor]:
    """`[3, L]` of each sequence of this rank, by its number: log-probs, entropies, values."""
    actor = load(Actor, group, folders["actor"], case, tp_invariant=True)
    critic = load(Critic, group, folders["critic"], case, tp_invariant=True)
    batch = make_batch()
    mine = list(range(actor.grid.rank("dp"), len(batch), case.dims.dp))
    part = batch.select(mine)
    columns = torch.stack([*actor.log_probs(part), critic.values(part)], dim=1)
    return dict(zip(mine, part.split(columns), strict=True))


def check(ranks: RankPool, folders: dict[str, Path], grids: list[Case]) -> None:
    expected = score(None, folders, Case(ParallelDims(), {}))
    assert all(column.unique().numel() > 3 for column in expected[2].T)
    for case in grids:
        seen: set[int] = set()
        for found in ranks.run(score, folders, case, world=case.dims.world_size):
            seen.update(found)
            for number, columns in found.items():
                assert torch.equal(columns, expected[number]), (case, number)
        assert seen == set(range(len(LENGTHS)))


def test_every_grid_and_batch_scores_the_same_bits(ranks: RankPool, folders: dict[str, Path]) -> None:
    check(ranks, folders, GRIDS)


@pytest.mark.slow
def test_more_grids_score_the_same_bits(ranks: RankPool, folders: dict[str, Path]) -> None:
    check(ranks, folders, MORE_GRIDS)


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs * inputs["weight"] - 0.1 * inputs.entropy)


def train(
    group: ProcessGroup | None, folders: dict[str, Path], case: Case, options: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Tensor], bool]:
    """The metrics of two updates, this rank's weights after them, and whether torch was deterministic."""
    try:
        actor = load(Actor, group, folders["actor"], case, optimizer=OptimizerOptions(learning_rate=1e-2), **options)
        batch = make_batch()
        part = batch.select(list(range(actor.grid.rank("dp"), len(batch), case.dims.dp)))
        metrics = [actor.update(part, loss) for _ in range(2)]
        parameters = {name: tensor for _, chunk in actor.engine.shards().chunks for name, tensor in chunk.items()}
        own = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in parameters.items()
        }
        return metrics, own, torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "dims", [ParallelDims(tp=2), pytest.param(ParallelDims(dp=2, tp=2), marks=pytest.mark.slow)], ids=str
)
def test_an_invariant_actor_learns_what_an_ordinary_one_learns(
    ranks: RankPool, folders: dict[str, Path], dims: ParallelDims
) -> None:
    case = Case(dims, {"max_tokens_per_micro_batch": 20})
    found, expected = (
        ranks.run(train, folders, case, {"tp_invariant": flag}, world=dims.world_size) for flag in (True, False)
    )
    for (ours, _, _), (theirs, _, _) in zip(found, expected, strict=True):
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", [GRIDS[0], pytest.param(MORE_GRIDS[0], marks=pytest.mark.slow)])
def test_deterministic_runs_are_the_same_bits(ranks: RankPool, folders: dict[str, Path], case: Case) -> None:
    """Metrics and weights of two updates, run twice."""
    first, second = (
        ranks.run(train, folders, case, {"deterministic": True}, world=case.dims.world_size) for _ in range(2)
    )
    for (metrics, weights, deterministic), (again, weights_again, _) in zip(first, second, strict=True):
        assert deterministic
        assert metrics == again
        for name, weight in weights.items():
            assert torch.equal(weight, weights_again[name])


def _refused(group: ProcessGroup, folders: dict[str, Path]) -> None:
    actor = load(Actor, group, folders["actor"], Case(ParallelDims(tp=2), {}), tp_invariant=True)
    with pytest.raises(ValueError, match="float8=True excludes tp_invariant=True: rounding in FP8 is not training's"):
        actor.generate([[1]], max_new_tokens=1, float8=True)
    with pytest.raises(ValueError, match="backend='transformers' does not offer tp_invariant=True"):
        Actor.from_pretrained(folders["actor"], backend="transformers", device="cpu", tp_invariant=True)


def test_refusals(ranks: RankPool, folders: dict[str, Path]) -> None:
    ranks.run(_refused, folders, world=2)
