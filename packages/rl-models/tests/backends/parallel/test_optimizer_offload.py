"""An optimizer whose state lies in host memory: the same bits, in buckets, through checkpoints and beside `offload`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cpu_streams import CurrentStream, OtherStream
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.memory import streamed
from parallel_layers.testing import RankPool
from parallel_models.optimizers import ShardOptimizer, rules
from rl_models import Actor, Batch, OptimizerOptions, losses

ONE, DP2TP2 = ParallelDims(), ParallelDims(dp=2, tp=2)
MOMENTS = ["float32", "bfloat16", "int8"]


def make(dtype: torch.dtype, device: str, **options: Any) -> tuple[nn.Module, ShardOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(70, 33), nn.LayerNorm(33), nn.Linear(33, 300, bias=False)).to(dtype)
    module[1].to(torch.float32)
    module = module.to(device)
    return module, ShardOptimizer(module, OptimizerOptions(1e-2, weight_decay=0.1, **options))


def steps(module: nn.Module, optimizer: ShardOptimizer, seed: int) -> list[float]:
    """Two steps; the first one clips the gradients, and the bias has none in the second."""
    norms = []
    for number in range(2):
        generator = torch.Generator().manual_seed(seed + number)
        for name, parameter in module.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device) * (1 - number + 1e-3)
            parameter.grad = None if number and name == "0.bias" else gradient
        norms.append(optimizer.step(1e-2))
    return norms


def same(first: ShardOptimizer, second: ShardOptimizer) -> bool:
    pairs = list(zip(first.module.parameters(), second.module.parameters(), strict=True))
    for one, two in pairs:
        mine, its = first.state(one), second.state(two)
        if mine.keys() != its.keys() or not torch.equal(one, two):
            return False
        if not all(torch.equal(mine[slot].cpu(), its[slot].cpu()) for slot in mine):
            return False
    return True


def check(moments: Any, dtype: torch.dtype, device: str) -> ShardOptimizer:
    """Steps, and a state that is loaded, against an optimizer without offload; return the offloaded one."""
    resident, offloaded = (make(dtype, device, moments=moments, offload=offload)[1] for offload in (False, True))
    assert same(resident, offloaded)
    for seed in (0, 10):
        assert steps(resident.module, resident, seed) == steps(offloaded.module, offloaded, seed)
        assert same(resident, offloaded)
    loaded = make(dtype, device, moments=moments, offload=True)[1]
    with torch.no_grad():
        for one, two in zip(offloaded.module.parameters(), loaded.module.parameters(), strict=True):
            two.copy_(one)
            loaded.load_state(two, offloaded.state(one))
    assert same(loaded, offloaded)
    steps(loaded.module, loaded, 20)
    steps(offloaded.module, offloaded, 20)
    assert same(loaded, offloaded)
    for parameter in loaded.module.parameters():
        loaded.load_state(parameter, {})
        assert loaded.state(parameter).keys() <= {"master"}
    return offloaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_bits_are_those_without_offload(moments: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(0)
    streams = CurrentStream(), OtherStream(chance), OtherStream(chance)
    monkeypatch.setattr(streamed, "_streams", lambda device: streams)
    monkeypatch.setattr(rules, "BUCKET", 1000)
    check(moments, dtype, "cpu")
    assert streams[1].pending + streams[2].pending == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_bits_are_those_without_offload_on_a_gpu(
    moments: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "BUCKET", 4096)
    optimizer = check(moments, dtype, "cuda")
    for parameter in optimizer.module.parameters():
        for slot, tensor in optimizer.state(parameter).items():
            assert tensor.device.type == "cpu", slot
            assert slot == "step" or moments == "int8" or tensor.is_pinned(), slot


def make_actor(path: Path, dims: ParallelDims, optimizer: OptimizerOptions) -> Actor:
    return Actor.from_pretrained(
        path, dims=dims, mesh=mesh_of(dims), device="cpu", dtype=torch.bfloat16, optimizer=optimizer
    )


def update(actor: Actor, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(61, (length,), generator=generator) for length in (9, 5, 12, 7)]
    own = rows[actor.grid.rank("dp") :: actor.grid.dims.dp]
    found = actor.update(Batch.from_sequences(own), lambda inputs: losses.LossTerms(-inputs.log_probs))
    return [found["loss"], found["grad_norm"]]


def learn(group: ProcessGroup | None, path: Path, dims: ParallelDims, algorithm: Any, root: Path) -> Any:
    """Updates with and without offload, and a checkpoint of the offloaded state after two of them."""
    torch.set_num_threads(1)
    found = []
    for offload in (False, True):
        options = OptimizerOptions(1e-2, weight_decay=0.1, max_grad_norm=0.5, algorithm=algorithm, offload=offload)
        actor = make_actor(path, dims, options)
        norms = [update(actor, seed) for seed in range(2)]
        if offload:
            actor.save_training(root, step=2)
        freed = actor.offload()
        actor.onload()
        found.append([*norms, *(update(actor, seed) for seed in range(2, 4))])
        assert freed > 0
    return found


@pytest.mark.parametrize(
    ("algorithm", "dims"),
    [
        ("adamw", ParallelDims(dp=2)),
        pytest.param("adamw", DP2TP2, marks=pytest.mark.slow),
        pytest.param("muon", DP2TP2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_actor_learns_the_same_and_goes_on_on_another_grid(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path, algorithm: Any, dims: ParallelDims
) -> None:
    path = tiny("llama")
    resident, offloaded = ranks.run(learn, path, dims, algorithm, tmp_path, world=dims.world_size, timeout=120)[0]
    assert resident == offloaded
    assert all(norm > 0.5 for _, norm in resident)  # they were clipped
    for offload in (True, False):
        options = OptimizerOptions(1e-2, weight_decay=0.1, max_grad_norm=0.5, algorithm=algorithm, offload=offload)
        actor = make_actor(path, ONE, options)
        assert actor.load_training(tmp_path).step == 2
        again = [update(actor, seed) for seed in range(2, 4)]
        for mine, its in zip(again, resident[2:], strict=True):
            assert mine == pytest.approx(its, rel=2e-2)


def test_megatron_has_no_offload(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="'megatron' has no optimizer with offload=True: Megatron-Core updates"):
        Actor.from_pretrained(
            tiny("llama"), backend="megatron", device="cpu", optimizer=OptimizerOptions(1e-2, offload=True)
        )


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    module, optimizer = make(torch.bfloat16, "cpu", offload=True)
    before: list[Tensor] = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, math.inf, dtype=torch.float32)
    assert not math.isfinite(optimizer.step(1e-2))
    assert all(torch.equal(mine, its) for mine, its in zip(module.parameters(), before, strict=True))
