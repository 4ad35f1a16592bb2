"""Router replay: routing recorded on one backend and grid sends the tokens the same way on another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, OptimizerOptions, losses

LENGTHS = (7, 1, 12, 0, 5)
PLACES = [
    ("transformers", ParallelDims(cp=2)),
    ("parallel", ParallelDims(tp=2, ep=2)),
    ("megatron", ParallelDims(dp=2, ep=2)),
]
MORE_PLACES = [
    ("parallel", ParallelDims(pp=2, cp=2)),
    ("transformers", ParallelDims(dp=2)),
    ("megatron", ParallelDims(tp=2)),
]
HYBRID_PLACES = [
    ("parallel", ParallelDims(tp=2, ep=2)),
    ("parallel", ParallelDims(cp=2)),
    ("parallel", ParallelDims(pp=2)),
    ("transformers", ParallelDims(cp=2)),
]


@pytest.fixture(scope="session")
def models(tiny: Callable[..., Path]) -> dict[str, Path]:
    layers: dict[str, Any] = {"num_hidden_layers": 3, "mlp_only_layers": (1,), "initializer_range": 0.3}
    hybrid = tiny("hybrid", **layers | {"initializer_range": 0.1})
    return {"mixture": tiny("mixture", **layers), "hybrid": hybrid, "dense": tiny("llama")}


def load(group: ProcessGroup, path: Path, backend: str, dims: ParallelDims) -> Actor:
    mesh = mesh_of(dims)
    # So large an epsilon makes AdamW's first step proportional to the gradient.
    optimizer = OptimizerOptions(learning_rate=100.0, eps=100.0, max_grad_norm=1e9)
    return Actor.from_pretrained(
        path, backend=backend, dims=dims, mesh=mesh, device="cpu", optimizer=optimizer, max_tokens_per_micro_batch=13
    )


def make_batch(routing: Tensor | None = None) -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(51, (length,), generator=generator) for length in LENGTHS]
    batch = Batch.from_sequences(rows, advantages=[torch.randn(length, generator=generator) for length in LENGTHS])
    return batch if routing is None else batch.with_fields(routing=routing)


def loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.LossTerms(inputs["advantages"] * inputs.log_probs, {})


def replay(
    group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, routing: Tensor
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """This rank's sequences; their own routing; log-probs under the given one, before and after a step with it."""
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        actor = load(group, path, backend, dims)
        indices = list(range(actor.grid.rank("dp"), len(LENGTHS), dims.dp))
        own = actor.predict(make_batch().select(indices), record_routing=True)
        part = make_batch(routing).select(indices)
        before = actor.log_probs(part).log_probs
        actor.update(part, loss)
        return indices, own["routing"], before, actor.log_probs(part).log_probs


def whole(results: list[Any], column: int) -> Tensor:
    """A per-token result in the order of the whole batch."""
    first = results[0][column]
    out = torch.zeros(sum(LENGTHS), *first.shape[1:], dtype=first.dtype)
    for result in results:
        out[make_batch().positions(result[0])] = result[column]
    return out


def own_routing(ranks: RankPool, path: Path) -> Tensor:
    ((_, routing, *_),) = ranks.run(
        replay, path, "transformers", ParallelDims(), torch.full((25, 2, 2), -1, dtype=torch.int16), world=1
    )
    return routing


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("mixture", PLACES),
        pytest.param("mixture", MORE_PLACES, marks=pytest.mark.slow),
        pytest.param("hybrid", HYBRID_PLACES, marks=pytest.mark.slow),
    ],
    ids=["some", "more", "hybrid"],
)
def test_routing_replays_on_every_backend_and_grid(
    ranks: RankPool, models: dict[str, Path], name: str, places: list[tuple[str, ParallelDims]]
) -> None:
    path = models[name]
    routing = own_routing(ranks, path)
    assert routing.shape == (25, 2, 2)  # layer 1 is dense
    assert routing.dtype == torch.int16
    other = (routing + 1) % 4
    other[3] = -1  # an engine that does not know
    (one,) = ranks.run(replay, path, "transformers", ParallelDims(), other, world=1)
    ((_, _, plain, _),) = ranks.run(replay, path, "transformers", ParallelDims(), routing, world=1)
    assert (one[2] - plain).abs().max() > 1e-3
    assert (one[3] - one[2]).abs().max() > 1e-3
    for backend, dims in places:
        results = ranks.run(replay, path, backend, dims, other, world=dims.world_size, timeout=120)
        assert torch.equal(whole(results, 1).sort(-1).values, routing.sort(-1).values), (backend, dims)
        for column in (2, 3):
            torch.testing.assert_close(
                whole(results, column),
                whole([one], column),
                rtol=0,
                atol=2e-5,
                msg=lambda text, at=f"{backend} {dims} {column}": f"{at}: {text}",
            )


def mistakes(group: ProcessGroup, models: dict[str, Path]) -> None:
    mixture, dense = (load(group, models[name], "transformers", ParallelDims()) for name in ("mixture", "dense"))
    with pytest.raises(ValueError, match="no mixture of experts"):
        dense.predict(make_batch(), record_routing=True)
    with pytest.raises(ValueError, match=r"routing must be \[T, 2, k\] integers for the layers \[0, 2\]"):
        mixture.log_probs(make_batch(torch.zeros(25, 3, 2, dtype=torch.int16)))
    with pytest.raises(ValueError, match=r"layer 0, token 0: experts \[4, 0\] name an expert outside 0\.\.3"):
        mixture.update(make_batch(torch.tensor([4, 0], dtype=torch.int16).expand(25, 2, 2)), loss)
    with pytest.raises(ValueError, match="leave one of them out"):
        mixture.predict(make_batch(torch.zeros(25, 2, 2, dtype=torch.int16)), record_routing=True)


def test_mistakes_are_named(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks.run(mistakes, models, world=1)
