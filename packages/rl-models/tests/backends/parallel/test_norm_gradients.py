"""One all-reduce sums the gradients of all norm weights of an update over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import MicroBatch
from rl_models import Actor, OptimizerOptions


def update(group: ProcessGroup | None, path: Path, dims: ParallelDims) -> tuple[int, dict[str, Tensor]]:
    """Return the all-reduces of an update of four micro-batches, and the gradients of the norms on this rank."""
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu", optimizer=OptimizerOptions())
    generator = torch.Generator().manual_seed(0)
    packs = [
        PackedSequence.from_sequences([torch.randint(61, (length,), generator=generator) for length in (5, 2, 9)])
        for _ in range(4)
    ]
    own = packs[actor.grid.rank("dp") :: dims.dp]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        actor.engine.forward_backward([MicroBatch(pack) for pack in own], lambda _, outputs: outputs[0].sum())
    gradients = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in actor.engine.module.named_parameters()
        if "norm" in name and parameter.grad is not None
    }
    # `profile.events()` orders thousands of events first, which takes seconds.
    events = profile.profiler.kineto_results.events()
    return sum(event.name() == "c10d::allreduce_" for event in events), gradients


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(tp=2),
        pytest.param(ParallelDims(dp=2, tp=2), marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_sums_all_norms_at_once(ranks: RankPool, tiny: Callable[..., Path], dims: ParallelDims) -> None:
    path = tiny("llama")
    _, expected = update(None, path, ParallelDims())
    seen = set[str]()
    for sent, found in ranks.run(update, path, dims, world=dims.world_size):
        assert sent == 1
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
        seen |= found.keys()
    assert seen == expected.keys()
    assert len(expected) == 5
