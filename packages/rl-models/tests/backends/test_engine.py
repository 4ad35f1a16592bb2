"""Every grid computes what one rank does: log-probs, entropies, values, losses, gradients, their norm, a clipped step.

That one rank computes what transformers does is shown in the repository's `tests/test_parity_models.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import PipelineOptions, RouterLosses
from parallel_models.training import why_no_zero_bubble
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.api.worker import Worker
from rl_models.losses import LossTerms

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3_moe": ("mixture", {"mlp_only_layers": (1,)}),
}
# One for each chunk of two virtual stages over pp 4, one for each chunk of all other grids.
LAYERS = (4, 8)
# Clips; with so large an epsilon the first step is proportional to the clipped gradient.
OPTIMIZER = OptimizerOptions(learning_rate=100.0, eps=100.0, max_grad_norm=0.5)
# Their gradients are a good part of the routers'.
ROUTER_LOSSES = RouterLosses(balance=3.0, sequence_balance=2.0, z=1.0)
# The longest fills a micro-batch alone.
LENGTHS = (11, 1, 17, 6, 2, 9)
TOKENS_PER_MICRO_BATCH = 17


@dataclass(frozen=True)
class Case:
    """A grid and how it is used."""

    dims: ParallelDims
    options: dict[str, Any]

    @property
    def layers(self) -> int:
        """How many the model has that this grid is tested with."""
        pipeline = self.options.get("pipeline", PipelineOptions())
        return next(layers for layers in LAYERS if layers >= self.dims.pp * pipeline.virtual_stages)

    def __str__(self) -> str:
        names = [f"{name}{getattr(self.dims, name)}" for name in ("pp", "dp", "cp", "tp", "ep", "replicate")]
        used = [name for name in names if not name.endswith("1")]
        return "-".join([*used, *(f"{name}={value}" for name, value in self.options.items())]) or "one"


@dataclass(frozen=True)
class Numbers:
    """What one rank of a grid has computed; gradients, and the parameters after a step, on the first rank alone."""

    sequences: list[int]
    outputs: list[Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def case(
    *,
    ring: bool = False,
    vpp: int = 1,
    zero_bubble: bool = False,
    plain_tp: bool = False,
    recompute: Any = None,
    **sizes: int,
) -> Case:
    options: dict[str, Any] = {"context_parallel": "ring"} if ring else {}
    if plain_tp:
        options["sequence_parallel"] = False
    zero_bubble = zero_bubble and why_no_zero_bubble() is None  # else the same grid in 1F1B
    if vpp > 1 or zero_bubble:
        options["pipeline"] = PipelineOptions("zero-bubble" if zero_bubble else "1f1b", virtual_stages=vpp)
    if recompute is not None:
        options["recompute"] = recompute
    return Case(ParallelDims(**sizes), options)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    weights = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in ("a", "b")}
    return Batch.from_sequences(rows, **weights)


def load(kind: type[Worker], path: Path, grid: Case, device: str, mesh: DeviceMesh | None, **options: Any) -> Any:
    """An actor or a critic."""
    return kind.from_pretrained(
        path,
        dims=grid.dims,
        mesh=mesh,
        device=device,
        max_tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
        **grid.options,
        **options,
    )


def actor_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(
        inputs.log_probs * inputs["a"] + inputs.entropy * inputs["b"], {"entropy": inputs.entropy.detach()}
    )


def critic_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["a"]).square())


class _Recorder:
    """An optimizer that keeps the gradients that it steps with, and the parameters after the step."""

    def __init__(self, worker: Worker) -> None:
        self.inner, self.engine = worker.optimizer, worker.engine
        self.gradients: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, *args: Any) -> float:
        chunks = [part for _, part in self.engine.shards().chunks]
        gradients = [{name: _gradient(parameter) for name, parameter in part.items()} for part in chunks]
        norm = self.inner.step(*args)
        pairs = [
            {name: _pair(mine[name], parameter) for name, parameter in part.items()}
            for mine, part in zip(gradients, chunks, strict=True)
        ]
        shards = self.engine.shards()
        for name, pair in ckpt.stream_hf(pairs, shards.layout, self.engine.grid.everyone, shards.places, to=[0]):
            self.gradients[name], self.parameters[name] = pair.cpu().unsqueeze(-1).view(torch.float32).unbind(-1)
        return norm


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(_local(parameter)) if parameter.grad is None else _local(parameter.grad).clone()


def _pair(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Two fp32 numbers in the bits of each fp64: gathered at once, since gathering is a good part of this test."""
    pair = torch.stack((gradient, _local(parameter)), -1).view(torch.float64).squeeze(-1)
    if not isinstance(parameter, DTensor):
        return pair
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(pair, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def measure(group: ProcessGroup, path: Path, grids: Sequence[Case]) -> list[list[Numbers]]:
    """The actor's numbers on one batch, of each of several grids of the same dims, and of the first the critic's, which
    go through the same engine from another head."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mesh = mesh_of(grids[0].dims, device)
    found = []
    for grid in grids:
        kinds = (Actor, Critic) if grid is grids[0] else (Actor,)
        try:
            found.append([_numbers(kind, path, grid, device, mesh) for kind in kinds])
        except Exception as error:
            error.add_note(f"on the grid {grid}")
            raise
    return found


def _worker(kind: type[Worker], path: Path, grid: Case, device: str, mesh: DeviceMesh | None) -> Any:
    """An actor, or a critic whose head is not new."""
    options: dict[str, Any] = {"optimizer": OPTIMIZER}
    if kind is Actor and path.name.startswith("mixture"):
        options["router_losses"] = ROUTER_LOSSES
    worker = load(kind, path, grid, device, mesh, **options)
    if kind is Critic and worker.grid.rank("pp") == grid.dims.pp - 1:
        # A new value head is zero, and would pass no gradient on.
        with torch.no_grad():
            for name, parameter in worker.engine.module.named_parameters():
                if name.startswith("score"):
                    parameter.fill_(0.3)
    return worker


def _predict(worker: Any, part: Batch) -> list[Tensor]:
    return list(worker.log_probs(part, temperature=1.3)) if isinstance(worker, Actor) else [worker.values(part)]


def _numbers(kind: type[Worker], path: Path, grid: Case, device: str, mesh: DeviceMesh | None) -> Numbers:
    worker = _worker(kind, path, grid, device, mesh)
    batch = make_batch()
    mine = list(range(worker.grid.rank("dp"), len(batch), grid.dims.dp))
    part = batch.select(mine)
    outputs = _predict(worker, part)
    loss = actor_loss if kind is Actor else critic_loss
    worker.optimizer = recorder = _Recorder(worker)
    metrics = worker.update(part, loss)
    return Numbers(mine, [output.cpu() for output in outputs], metrics, recorder.gradients, recorder.parameters)


def assert_equal(actual: Sequence[list[Numbers]], expected: list[Numbers], grid: Case, tolerance: float = 1e-5) -> None:
    """Every rank's numbers of one grid, `[rank][actor or critic]`, against one rank's."""
    batch = make_batch()
    for role, wanted in enumerate(expected[: len(actual[0])]):
        seen: set[int] = set()
        for numbers in (rank[role] for rank in actual):
            seen.update(numbers.sequences)
            where = batch.positions(numbers.sequences)
            for ours, theirs in zip(numbers.outputs, wanted.outputs, strict=True):
                torch.testing.assert_close(
                    ours, theirs[where], rtol=0, atol=tolerance, msg=lambda text: f"{grid}: {text}"
                )
            assert numbers.metrics.keys() == wanted.metrics.keys()
            for name, value in wanted.metrics.items():
                assert abs(numbers.metrics[name] - value) <= tolerance * max(1, abs(value)), (str(grid), name)
        assert seen == set(range(len(batch)))
        gradients = actual[0][role].gradients
        assert wanted.metrics["grad_norm"] > OPTIMIZER.max_grad_norm
        assert gradients.keys() == wanted.gradients.keys() == wanted.parameters.keys()
        without = [name for name, gradient in wanted.gradients.items() if not gradient.any()]
        # In a deep model a router may choose no token for one of the experts.
        assert len(without) <= 3, without
        assert all(".experts." in name for name in without), without
        for name, gradient in wanted.gradients.items():
            atol = tolerance * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(
                gradients[name], gradient, rtol=0, atol=atol, msg=lambda text, name=name: f"{grid}, {name}: {text}"
            )
        for name, parameter in wanted.parameters.items():
            torch.testing.assert_close(
                actual[0][role].parameters[name],
                parameter,
                rtol=0,
                atol=tolerance,
                msg=lambda text, name=name: f"{grid}, {name} after a step: {text}",
            )


@dataclass
class Reference:
    """What one rank computes, which every grid of the same number of layers is compared with."""

    ranks: RankPool
    tiny: Callable[..., Path]
    found: dict[tuple[str, int], list[Numbers]] = field(default_factory=dict)

    def path(self, model: str, layers: int) -> Path:
        name, changes = MODELS[model]
        return self.tiny(name, num_hidden_layers=layers, **changes)

    def __call__(self, model: str, layers: int) -> list[Numbers]:
        key = model, layers
        if key not in self.found:
            self.found[key] = self.ranks.run(measure, self.path(*key), [case()], world=1)[0][0]
            assert all(math.isfinite(value) for numbers in self.found[key] for value in numbers.metrics.values())
        return self.found[key]


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def one_rank(ranks: RankPool, tiny: Callable[..., Path]) -> Reference:
    return Reference(ranks, tiny)


def all_grids(experts: bool) -> list[Case]:
    """Every combination of tp, pp, cp, ep and dp on up to four ranks, each in every way: schedules and virtual stages
    of a pipeline, both forms of context parallelism, tensor parallelism without sequence parallelism.

    A schedule does not know what is in a layer: with experts each schedule has one number of virtual stages.
    """
    grids = []
    schedules = [("1f1b", 1), ("zero-bubble", 2), *([] if experts else [("1f1b", 2), ("zero-bubble", 1)])]
    for tp, pp, cp, dp, ep in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2) if experts else (1,)):
        if 1 < tp * pp * cp * dp <= 4 and cp * dp * tp % ep == 0:
            for schedule, vpp in schedules if pp > 1 else [("1f1b", 1)]:
                for ring, plain_tp in itertools.product((False, True)[:cp], (False, True) if tp > 1 else (False,)):
                    grids.append(
                        case(
                            tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, vpp=vpp, zero_bubble=schedule == "zero-bubble",
                            ring=ring, plain_tp=plain_tp,
                        )
                    )  # fmt: skip
    return grids


FEW = {
    "llama": [case(pp=2, vpp=2, zero_bubble=True, recompute="selective"), case(cp=2, tp=2, ring=True)],
    "qwen3_moe": [case(dp=2, tp=2, ep=2, recompute="full")],
}
RECOMPUTED = {
    "llama": [
        case(pp=2, vpp=2, dp=2, zero_bubble=True, recompute="selective"),
        case(pp=2, cp=2, recompute="full"),
    ],
    "qwen3_moe": [case(cp=2, dp=2, ep=2, recompute=[1, 2])],
}


# Replicas of several ranks, and of one rank, with experts whose shards have replicas, too.
REPLICAS = {
    "llama": [case(dp=4, replicate=2), case(dp=2, tp=2, replicate=2)],
    "qwen3_moe": [case(dp=4, ep=2, replicate=2)],
}
# Also experts that are whole within a replica, and replicas of each pipeline stage.
REPLICAS_ON_EIGHT_RANKS = {
    "llama": [
        case(dp=8, replicate=4),
        case(dp=4, tp=2, replicate=2),
        case(pp=2, dp=4, replicate=2, vpp=2),
        case(dp=4, cp=2, replicate=2, ring=True),
    ],
    "qwen3_moe": [
        case(dp=8, ep=2, replicate=2),
        case(dp=4, tp=2, ep=2, replicate=2),
        case(dp=4, tp=2, ep=4, replicate=2),
        case(pp=2, dp=4, ep=2, replicate=2, zero_bubble=True),
        case(dp=4, cp=2, ep=4, replicate=2),
    ],
}

ON_GPUS = {
    "llama": [
        *(case(tp=2), case(pp=2, vpp=2), case(dp=2, recompute="full"), case(dp=2, replicate=2)),
        *(case(cp=2), case(cp=2, ring=True)),
    ],
    "qwen3_moe": [case(tp=2, ep=2), case(dp=2, ep=2), case(dp=2, replicate=2), case(pp=2, recompute="selective")],
}

# Three or four forms of parallelism at once.
ON_EIGHT_RANKS = {
    "llama": [
        case(pp=2, dp=2, tp=2, vpp=2),
        case(pp=2, cp=2, tp=2, ring=True, zero_bubble=True),
        case(pp=2, dp=2, cp=2, recompute="full"),
        case(dp=2, cp=2, tp=2, plain_tp=True),
        case(pp=2, dp=4),
        case(pp=4, tp=2, vpp=2),
    ],
    "qwen3_moe": [
        case(pp=2, dp=2, tp=2, ep=2),
        case(pp=2, dp=2, tp=2, ep=4, zero_bubble=True),
        case(dp=2, cp=2, tp=2, ep=2),
        case(dp=2, cp=2, tp=2, ep=4, ring=True),
        case(pp=2, dp=2, cp=2, ep=2, vpp=2),
        case(pp=2, cp=2, tp=2, ep=4, recompute="selective"),
    ],
}


def check(ranks: RankPool, one_rank: Reference, model: str, grids: list[Case], tolerance: float = 1e-5) -> None:
    """Compare all that the grids compute; those of the same dims share their process groups."""
    together: dict[tuple[ParallelDims, int], list[Case]] = {}
    for grid in grids:
        together.setdefault((grid.dims, grid.layers), []).append(grid)
    for (dims, layers), cases in together.items():
        expected = one_rank(model, layers)
        path = one_rank.path(model, layers)
        results = ranks.run(measure, path, cases, world=dims.world_size, timeout=60 * len(cases))
        for grid, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
            assert_equal(of_ranks, expected, grid, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("model", FEW)
def test_some_grids_compute_what_one_rank_does(ranks: RankPool, one_rank: Reference, model: str) -> None:
    check(ranks, one_rank, model, FEW[model])


ALONE = {
    "llama": [case(pp=2, vpp=2, zero_bubble=True), case(cp=2, ring=True), case(tp=2), case(pp=2), case(cp=2)],
    "qwen3_moe": [case(dp=2, ep=2), case(dp=2), case(tp=2, ep=2), case(pp=2)],
}
# Of a batch with nothing else: the sequence of one token, which has nothing to learn, and the longest.
SHORT, LONG = 1, 2


def score_and_learn_alone(
    group: ProcessGroup, path: Path, grid: Case
) -> list[tuple[list[list[Tensor]], dict[str, float]]]:
    """Return for actor and critic the outputs of the short sequence, those of the long one before and after a step with
    it, and the metrics of that step. The sequence is the first data-parallel rank's, the others have none."""
    mesh = mesh_of(grid.dims)
    found = []
    for kind, loss in ((Actor, actor_loss), (Critic, critic_loss)):
        worker = _worker(kind, path, grid, "cpu", mesh)
        short, long = (make_batch().select([n] if worker.grid.rank("dp") == 0 else []) for n in (SHORT, LONG))
        outputs = [_predict(worker, short), _predict(worker, long)]
        metrics = worker.update(long, loss)
        found.append(([*outputs, _predict(worker, long)], metrics))
    return found


@pytest.mark.parametrize(
    ("model", "grids"),
    [
        ("llama", ALONE["llama"][:1]),
        ("qwen3_moe", ALONE["qwen3_moe"][:1]),
        *[pytest.param(model, grids, marks=pytest.mark.slow) for model, grids in ALONE.items()],
    ],
    ids=["llama", "qwen3_moe", "llama-all", "qwen3_moe-all"],
)
def test_a_sequence_alone_is_what_it_is_on_one_rank(
    ranks: RankPool, one_rank: Reference, model: str, grids: list[Case]
) -> None:
    path = one_rank.path(model, 4)
    (expected,) = ranks.run(score_and_learn_alone, path, case(), world=1)
    for grid in grids:
        results = ranks.run(score_and_learn_alone, path, grid, world=2, timeout=60)
        for rank, found in enumerate(results):
            for (outputs, metrics), (wanted, of_one) in zip(found, expected, strict=True):
                assert [len(output) for output, *_ in wanted] == [1, 17, 17]
                assert (wanted[2][0] - wanted[1][0]).abs().max() > 1e-3
                for ours, theirs in zip(itertools.chain(*outputs), itertools.chain(*wanted), strict=True):
                    # Where this rank is another data-parallel one, it has nothing.
                    mine = theirs if grid.dims.dp == 1 or rank == 0 else theirs[:0]
                    torch.testing.assert_close(
                        ours, mine, rtol=0, atol=1e-5, msg=lambda text, grid=grid: f"{grid}: {text}"
                    )
                assert metrics == pytest.approx(of_one, rel=1e-5, abs=1e-5), str(grid)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("model", ON_GPUS)
def test_grids_on_gpus(nccl_ranks: RankPool, one_rank: Reference, model: str) -> None:
    """Against one rank on a CPU, in fp32: a GPU adds up in another order."""
    check(nccl_ranks, one_rank, model, ON_GPUS[model], tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", FEW)
def test_all_grids_compute_what_one_rank_does(ranks: RankPool, one_rank: Reference, model: str) -> None:
    check(ranks, one_rank, model, all_grids(experts=model == "qwen3_moe") + RECOMPUTED[model])


@pytest.mark.slow  # replicas learn in every run in `parallel/test_muon.py`
@pytest.mark.parametrize("model", REPLICAS)
def test_replicas_compute_what_one_rank_does(ranks: RankPool, one_rank: Reference, model: str) -> None:
    check(ranks, one_rank, model, REPLICAS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", REPLICAS_ON_EIGHT_RANKS)
def test_replicas_on_eight_ranks_compute_what_one_rank_does(
    eight_ranks: RankPool, one_rank: Reference, model: str
) -> None:
    check(eight_ranks, one_rank, model, REPLICAS_ON_EIGHT_RANKS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", ON_EIGHT_RANKS)
def test_grids_of_eight_ranks_compute_what_one_rank_does(
    eight_ranks: RankPool, one_rank: Reference, model: str
) -> None:
    check(eight_ranks, one_rank, model, ON_EIGHT_RANKS[model])
