"""Training on `backend="megatron"`: the optimizer's state and its checkpoints on every grid, fp16, divided moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_layers.training import Schedule
from rl_models import Actor, Batch, LossInputs, MegatronOptions, OptimizerOptions, PipelineOptions
from rl_models.losses import LossTerms


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", num_hidden_layers=4)


@pytest.fixture(scope="session")
def mixture(tiny: Callable[..., Path]) -> Path:
    return tiny("mixture", num_hidden_layers=4)


def make_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_sequences([torch.randint(37, (n,), generator=generator) for n in (7, 3, 12, 5)])


def actor_on(path: Path, dims: ParallelDims, backend: str = "megatron", **options: Any) -> Actor:
    mesh = mesh_of(dims)
    return Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu", **options)


def loss(inputs: LossInputs) -> LossTerms:
    # So small that the first loss scale of fp16 does not make its gradients overflow.
    return LossTerms(-inputs.log_probs / 64)


def train(actor: Actor, first: int, last: int) -> list[float]:
    """The losses of some steps; every data-parallel rank takes its own part of each step's batch."""
    dp, rank = actor.grid.dims.dp, actor.grid.rank("dp")
    batches = (make_batch(seed) for seed in range(first, last))
    return [actor.update(batch.select(list(range(rank, len(batch), dp))), loss)["loss"] for batch in batches]


def optimizer_state_on(group: ProcessGroup, path: Path, dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "optimizer": OptimizerOptions(learning_rate=1e-2, weight_decay=0.1)}
    with cpu_stand_in():
        one, other = actor_on(path, ParallelDims(), **options), actor_on(path, ParallelDims(), **options)
        pairs = list(zip(one.engine.module.parameters(), other.engine.module.parameters(), strict=True))
        assert one.optimizer.state(pairs[0][0]) == {}
        one.update(make_batch(), loss)
        with torch.no_grad():
            for mine, copy in pairs:
                copy.copy_(mine)
                state = one.optimizer.state(mine)
                assert state.keys() >= {"step", "exp_avg", "exp_avg_sq"}
                assert ("master" in state) == (dtype == torch.bfloat16)
                other.optimizer.load_state(copy, state)
        assert len(list(one.optimizer.tensors())) == len(pairs) * (3 if dtype == torch.bfloat16 else 2)
        first, second = one.update(make_batch(), loss), other.update(make_batch(), loss)
        assert first == second
        for mine, copy in pairs:
            assert torch.equal(mine, copy)
            for name, value in one.optimizer.state(mine).items():
                assert torch.equal(value, other.optimizer.state(copy)[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizers_state_comes_out_and_goes_in(ranks: RankPool, model: Path, dtype: torch.dtype) -> None:
    ranks.run(optimizer_state_on, model, dtype, world=1)


def resumed_on(group: ProcessGroup, path: Path, root: Path, runs: list[tuple[str, ParallelDims, int, bool]]) -> None:
    """Save on the first grid, go on on each of the others, and save and go on there, too."""

    def begin(backend: str, dims: ParallelDims, virtual_stages: int, divided: bool) -> Actor:
        options: dict[str, Any] = {"optimizer": OptimizerOptions(learning_rate=1e-2)}
        if virtual_stages > 1:
            options["pipeline"] = PipelineOptions(virtual_stages=virtual_stages)
        if backend == "megatron":
            options["megatron"] = MegatronOptions(distributed_optimizer=divided)
        return actor_on(path, dims, backend, **options)

    with cpu_stand_in():
        first = begin(*runs[0])
        train(first, 0, 2)
        first.save_training(root / "0")
        expected = train(first, 2, 6)
        saved = root / "0"
        for number, run in enumerate(runs[1:], 1):
            actor = begin(*run)
            actor.load_training(saved)
            assert train(actor, 2, 4) == pytest.approx(expected[:2], rel=0, abs=1e-6), run
            actor.save_training(root / str(number))
            # And back.
            back = begin(*runs[0])
            back.load_training(root / str(number))
            assert train(back, 4, 6) == pytest.approx(expected[2:], rel=0, abs=1e-6), run


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(
            [("megatron", ParallelDims(dp=2), 1, True), ("megatron", ParallelDims(pp=2), 2, True)],
            id="divided optimizer and virtual stages",
        ),
        pytest.param(
            [("megatron", ParallelDims(pp=2), 2, True), ("megatron", ParallelDims(tp=2), 1, True)],
            marks=pytest.mark.slow,
            id="virtual stages",
        ),
        pytest.param(
            [("megatron", ParallelDims(dp=2), 1, True), ("megatron", ParallelDims(tp=2), 1, True)],
            marks=pytest.mark.slow,
            id="divided optimizer",
        ),
        pytest.param(
            [
                ("megatron", ParallelDims(tp=2), 1, True),
                ("megatron", ParallelDims(dp=2), 1, False),
                ("megatron", ParallelDims(cp=2), 1, True),
                ("megatron", ParallelDims(pp=2), 2, True),
                ("parallel", ParallelDims(dp=2), 1, True),
            ],
            marks=pytest.mark.slow,
            id="every grid",
        ),
    ],
)
def test_a_run_goes_on_on_another_grid_and_back(
    ranks: RankPool, model: Path, tmp_path: Path, runs: list[tuple[str, ParallelDims, int, bool]]
) -> None:
    ranks.run(resumed_on, model, tmp_path, runs, world=2)


@pytest.mark.slow
def test_a_run_of_experts_goes_on_on_another_grid_and_back(ranks: RankPool, mixture: Path, tmp_path: Path) -> None:
    runs = [("megatron", ParallelDims(dp=2, ep=2), 1, True), ("megatron", ParallelDims(dp=2), 1, True)]
    ranks.run(resumed_on, mixture, tmp_path, runs, world=2)


def divided_on(group: ProcessGroup, path: Path, dtype: torch.dtype) -> None:
    # Without clipping, the sum of whose parts is rounded otherwise.
    options = {"optimizer": OptimizerOptions(learning_rate=1e-2, max_grad_norm=math.inf), "dtype": dtype}
    with cpu_stand_in():
        divided, whole = (
            actor_on(path, ParallelDims(dp=2), megatron=MegatronOptions(distributed_optimizer=on), **options)
            for on in (True, False)
        )
        assert train(divided, 0, 3) == pytest.approx(train(whole, 0, 3), rel=1e-6)
        held = [sum(x.numel() for x in actor.optimizer.tensors()) for actor in (divided, whole)]
        assert held[0] <= held[1] / 2 + 128
        pairs = zip(divided.engine.module.parameters(), whole.engine.module.parameters(), strict=True)
        for mine, other in pairs:
            assert torch.equal(mine, other)
            parts, state = divided.optimizer.state(mine), whole.optimizer.state(other)
            assert parts.keys() == state.keys()
            assert ("master" in parts) is (dtype != torch.float32)
            for name, value in parts.items():
                assert isinstance(value, DTensor) == (name != "step")
                assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, state[name]), name
        # Gradients are given up between steps, and weights and moments leave together.
        assert all(
            buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in divided.engine.trained(None)[0].buffers
        )
        divided.offload()
        divided.onload()
        assert train(divided, 3, 5) == pytest.approx(train(whole, 3, 5), rel=1e-6)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_the_optimizer_is_divided_over_data_parallelism(ranks: RankPool, model: Path, dtype: torch.dtype) -> None:
    ranks.run(divided_on, model, dtype, world=2)


def overflow_on(group: ProcessGroup, path: Path, root: Path, dims: ParallelDims) -> None:
    options = {
        "dtype": torch.float16,
        "optimizer": OptimizerOptions(learning_rate=1e-2, schedule=Schedule("linear", total_steps=100)),
    }

    def overflows(inputs: LossInputs) -> LossTerms:
        return LossTerms(inputs.log_probs * math.inf)

    with cpu_stand_in():
        actor = actor_on(path, dims, **options)
        first = train(actor, 0, 1)
        assert (actor.steps, actor.skipped_steps) == (1, 0)
        before = [parameter.clone() for parameter in actor.engine.module.parameters()]
        part = make_batch().select([actor.grid.rank("dp"), 2 + actor.grid.rank("dp")])
        for skipped in (1, 2):
            metrics = actor.update(part, overflows)
            assert metrics["skipped_steps"] == actor.skipped_steps == skipped
            assert metrics["learning_rate"] == pytest.approx(1e-2 * 0.99)
            assert metrics["loss_scale"] == 2.0**16
        assert actor.steps == 1
        assert all(map(torch.equal, before, actor.engine.module.parameters()))
        # Two in a row halve the scale; the schedule has stood still.
        metrics = actor.update(part, loss)
        assert metrics["loss_scale"] == 2.0**15
        assert metrics["learning_rate"] == pytest.approx(1e-2 * 0.99)
        assert (actor.steps, actor.skipped_steps) == (2, 2)
        assert any(not torch.equal(a, b) for a, b in zip(before, actor.engine.module.parameters(), strict=True))
        actor.save_training(root)
        resumed = actor_on(path, dims, **options)
        resumed.load_training(root)
        assert (resumed.steps, resumed.skipped_steps, resumed.optimizer.loss_scale) == (2, 2, 2.0**15)
        # The counters, too: the next overflow halves the scale at once.
        assert resumed.optimizer.loss_scale_state == actor.optimizer.loss_scale_state
        assert actor.optimizer.loss_scale_state == {"scale": 2.0**15, "growth_tracker": 1, "hysteresis_tracker": 0}
        assert train(resumed, 1, 3) == train(actor, 1, 3)
        reference = actor_on(path, dims, dtype=torch.float32)
        assert first == pytest.approx(train(reference, 0, 1), rel=1e-2)


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(),
        *(pytest.param(dims, marks=pytest.mark.slow) for dims in (ParallelDims(dp=2), ParallelDims(dp=2, ep=2))),
    ],
    ids=str,
)
def test_an_overflow_of_fp16_is_a_counted_skipped_step(
    ranks: RankPool, model: Path, mixture: Path, tmp_path: Path, dims: ParallelDims
) -> None:
    ranks.run(overflow_on, mixture if dims.ep > 1 else model, tmp_path, dims, world=dims.world_size)


def resumed_from_muon(group: ProcessGroup, path: Path, root: Path) -> None:
    muon = actor_on(path, ParallelDims(), "parallel", optimizer=OptimizerOptions(algorithm="muon"))
    train(muon, 0, 1)
    muon.save_training(root)
    with cpu_stand_in(), pytest.raises(ValueError, match="the optimizer state momentum_buffer, step of a weight whose"):
        actor_on(path, ParallelDims()).load_training(root)


def test_the_state_of_muon_is_refused(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    ranks.run(resumed_from_muon, model, tmp_path, world=1)
