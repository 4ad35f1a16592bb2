"""Weights from the ranks of an actor to the processes of engines, from shard to shard, against the actor's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.transfer import TargetShards, receive_hf
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, LoraOptions
from rl_train.engines.process import load_into
from rl_train.weight_sync.receiver import WeightReceiver
from rl_train.weight_sync.shard_sender import NoShards, ShardSender, _Parties
from rl_train.weight_sync.transport import BucketMissed, WeightMessage


class Shard:
    """A `ShardedEngine` with the tensors of a place of a grid."""

    def __init__(self, model: Path, layout: ckpt.Layout, place: ckpt.Place) -> None:
        self.tensors = {name: torch.full_like(x, 7) for name, x in ckpt.load_hf(model, layout, place).items()}
        self.place, self.receiver = place, WeightReceiver()
        self.failure: Exception | None = None

    def fill(self, fill: Callable[[list[dict[str, Tensor]]], None]) -> None:
        if self.failure is not None:
            raise self.failure
        fill([self.tensors])


class Engine:
    """An `EngineHandle` whose processes are threads."""

    silence = 30.0

    def __init__(self, model: Path, grid: ckpt.Grid) -> None:
        self.layout = ckpt.layout_for(model, target="parallel")
        self.parts = [Shard(model, self.layout, place) for place in grid.places()]
        self.calls, self.threads = list[str](), ThreadPoolExecutor(1 + len(self.parts))

    def submit(self, method: str, *args: Any) -> Future[Any]:
        self.calls.append(method)
        return self.threads.submit(getattr(self, method), *args)

    def ready(self) -> list[tuple[str, str]]:
        return [("", part.receiver.key) for part in self.parts]

    def shards(self) -> list[TargetShards]:
        return [TargetShards.of_model(self.layout, [(part.place, part.tensors)]) for part in self.parts]

    def load(self, messages: list[WeightMessage]) -> None:
        loads = [(part, part.receiver, message) for part, message in zip(self.parts, messages, strict=True)]
        for done in [self.threads.submit(load_into, *load) for load in loads]:
            done.result()

    def require_weights(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        for part in self.parts:
            expected = {name: torch.full_like(tensor, 7) for name, tensor in part.tensors.items()}
            receive_hf(named_tensors, self.layout, [(part.place, expected)])
            assert all(torch.equal(part.tensors[name], tensor) for name, tensor in expected.items())

    def require_bits(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        for part in self.parts:
            expected = {name: torch.full_like(tensor, 7) for name, tensor in part.tensors.items()}
            receive_hf(named_tensors, self.layout, [(part.place, expected)])
            bits = [
                x.contiguous().view(torch.uint8) for pair in expected.items() for x in (pair[1], part.tensors[pair[0]])
            ]
            assert all(torch.equal(a, b) for a, b in zip(bits[::2], bits[1::2], strict=True))

    def close(self) -> None:
        for part in self.parts:
            part.receiver.close()
        self.threads.shutdown()


class TakesWholeTensors(Engine):
    """An engine of another kind, such as vLLM."""

    def shards(self) -> list[TargetShards]:
        return []


def synced(group: ProcessGroup, model: Path, dims: ParallelDims, grid: ckpt.Grid, lora: LoraOptions | None) -> int:
    """Send four versions to two engines, and return the bytes that this rank sends.

    The third version finds a new engine, and the last one comes after it was refused.
    """
    mesh = dims.build_mesh("cpu", range(dims.world_size))
    actor = Actor.from_pretrained(model, dims=dims, mesh=mesh, device="cpu", lora=lora)
    size = (model / "model.safetensors").stat().st_size // 8
    sender = ShardSender(check=True, bucket_bytes=size)
    engines = [Engine(model, grid) for _ in range(2)] if group.rank() == 0 else None
    groups = set[str]()
    for version in range(4):
        for parameter in actor.engine.module.parameters():
            parameter.data.add_(version + 0.01)
        if version == 2 and engines is not None:
            engines[0].close()
            engines[0] = Engine(model, grid)
        if version == 3:
            refused(sender, actor, engines)
        sender.sync(actor, engines)
        groups.add(sender._peers[0].rendezvous.key)
        whole = [(name, tensor.clone()) for name, tensor in actor.stream_weights(to=[0])]
        for engine in engines or ():
            engine.require_weights(whole)
            assert engine.calls == ["ready", *["shards"] * (version in (0, 2)), "load"]
            engine.calls.clear()
    assert len(groups) == 3
    rounds = sender.plan.rounds
    assert len(rounds) > 3
    assert all(sum(copy.nbytes for copy in copies) <= size for copies in rounds)
    with pytest.raises(BucketMissed):  # the first rank has lost its engines: all ranks hear of it
        sender.sync(actor, None)
    if engines is not None:
        engines[0].close()
        engines[0] = TakesWholeTensors(model, grid)
    with pytest.raises(NoShards, match="takes whole tensors"):
        sender.sync(actor, engines)
    for engine in engines or ():
        engine.close()
    sender.close()
    sent = sum(copy.nbytes for copies in rounds for copy in copies)
    total = torch.tensor(sent)
    torch.distributed.all_reduce(total, group=group)
    assert total == actor.held_weights().nbytes  # the engines send the rest to each other
    return sent


def local_part(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def changed(group: ProcessGroup, model: Path, dims: ParallelDims, grid: ckpt.Grid) -> list[int]:
    """Send versions to two engines as changed values, and return the bytes that this rank sends for each.

    All values, few, none, all again, few after a refusal, which must be all, and few to an engine that has others.
    """
    mesh = dims.build_mesh("cpu", range(dims.world_size))
    actor = Actor.from_pretrained(model, dims=dims, mesh=mesh, device="cpu")
    parameters = [local_part(x) for x in actor.engine.module.parameters()]
    size = (model / "model.safetensors").stat().st_size // 8
    sender = ShardSender(check=True, bucket_bytes=size, changed_only=True)
    engines = [Engine(model, grid) for _ in range(2)] if group.rank() == 0 else None

    sent = []
    for version, change in enumerate(("few", "few", "none", "all", "few", "few")):
        for parameter in parameters:
            if change == "few":
                parameter.view(-1)[version::100].neg_()
            elif change == "all":
                parameter.add_(0.01)
        if version == 4:
            refused(sender, actor, engines)
        sender.sync(actor, engines)
        sent.append(sender.sent_bytes)
        whole = [(name, tensor.clone()) for name, tensor in actor.stream_weights(to=[0])]
        for engine in engines or ():
            engine.require_bits(whole)
    begun = time.monotonic()
    if engines is not None:  # a value that no weight sync has written
        next(iter(engines[0].parts[0].tensors.values())).view(-1)[-1] += 1
        with pytest.raises(ValueError, match="has other bits than at the sender"):
            sender.sync(actor, engines)
    else:
        with pytest.raises(BucketMissed):
            sender.sync(actor, None)
    assert time.monotonic() - begun < 10
    if engines is not None:
        engines[0].close()
        engines[0] = TakesWholeTensors(model, grid)
    with pytest.raises(ValueError, match="takes whole tensors; changed weights alone"):
        sender.sync(actor, engines)
    for engine in engines or ():
        engine.close()
    sender.close()
    return sent


def refused(sender: ShardSender, actor: Actor, engines: list[Engine] | None) -> None:
    """An engine refuses the weights: all ranks hear of it long before the time limit of 30 s."""
    begun = time.monotonic()
    if engines is None:
        with pytest.raises(BucketMissed):
            sender.sync(actor, None)
    else:
        engines[1].parts[0].failure = OSError("no room")
        with pytest.raises(OSError, match="no room"):
            sender.sync(actor, engines)
        engines[1].parts[0].failure = None
        for engine in engines:
            engine.calls.clear()
    assert time.monotonic() - begun < 10


LORA = LoraOptions(rank=4)
EXPERTS = LoraOptions(rank=4, targets=["all-linear", "experts.gate_up_proj", "experts.down_proj"])


@pytest.mark.parametrize(
    ("name", "dims", "grid", "lora"),
    [
        ("mixture", ParallelDims(dp=2, ep=2), ckpt.Grid(tp=2), None),
        pytest.param("tied", ParallelDims(pp=2), ckpt.Grid(ep=1), None, marks=pytest.mark.slow),
        pytest.param("llama", ParallelDims(tp=2), ckpt.Grid(pp=2), LORA, marks=pytest.mark.slow),
        pytest.param("mixture", ParallelDims(dp=2), ckpt.Grid(ep=2), EXPERTS, marks=pytest.mark.slow),
        pytest.param("llama", ParallelDims(cp=2), ckpt.Grid(tp=2), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_engines_hold_what_the_actor_streams(
    ranks: RankPool, folders: dict[str, Path], name: str, dims: ParallelDims, grid: ckpt.Grid, lora: LoraOptions | None
) -> None:
    """The group and the plan stay; the ranks send each byte once, and no rank sends more than its part."""
    sent = ranks.run(synced, folders[name], dims, grid, lora, world=2, timeout=60)
    assert max(sent) <= 1.2 * min(sent)


@pytest.mark.parametrize(
    ("ranks", "engine", "backend"),
    [
        (["gpu 0", "gpu 1"], ["gpu 2", "gpu 3"], "nccl"),
        (["gpu 0", "gpu 1"], ["gpu 1"], None),
        (["gpu 0"], ["gpu 1", "gpu 1"], None),
        (["gpu 0"], [""], "gloo"),
        (["", ""], [""], "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_each_process(ranks: list[str], engine: list[str], backend: str | None) -> None:
    parties = _Parties(ranks, [[(device, "a process") for device in engine]], 30.0)
    if backend is None:
        with pytest.raises(NoShards, match="share a GPU"):
            _ = parties.backend
    else:
        assert parties.backend == backend


@pytest.mark.parametrize(
    ("name", "dims", "grid"),
    [
        ("mixture", ParallelDims(dp=2, ep=2), ckpt.Grid(tp=2)),
        pytest.param("tied", ParallelDims(pp=2), ckpt.Grid(ep=1), marks=pytest.mark.slow),
        pytest.param("llama", ParallelDims(tp=2), ckpt.Grid(pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_changed_values_alone_are_sent(
    ranks: RankPool, folders: dict[str, Path], name: str, dims: ParallelDims, grid: ckpt.Grid
) -> None:
    """Engines hold the actor's bits after each version; the bytes are counted."""
    for everything, few, nothing, every, anew, behind in ranks.run(
        changed, folders[name], dims, grid, world=2, timeout=60
    ):
        assert everything <= every <= 1.1 * everything
        assert anew == everything
        assert nothing < few < 0.1 * everything
        assert abs(few - behind) < 0.2 * few
