"""Ranks that come late, and a node that is lost: a named error in time, and a run that goes on as it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, LossInputs, losses
from rl_train import RankDied, RayModelGroup, Resources
from rl_train.processes.errors import RankFailed
from rl_train.processes.times import DEATH_SECONDS

# A node as the cluster's others are.
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
# The whole call, the notice of the death included.
LIMIT = 60.0


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = (9, 4, 12, 7)
    rows = [torch.randint(61, (length,), generator=generator) for length in lengths]
    advantages = [torch.randn(length, generator=generator) for length in lengths]
    return Batch.from_sequences(rows, advantages=advantages, old_log_probs=[torch.full((n,), -4.0) for n in lengths])


def policy_loss() -> Callable[..., losses.LossTerms]:
    """Nested, since the nodes can not import this file."""

    def loss(inputs: LossInputs) -> losses.LossTerms:
        return losses.ppo_clip(
            inputs.log_probs, inputs["old_log_probs"], inputs["advantages"], clip_low=0.9, clip_high=50
        )

    return loss


def train(group: RayModelGroup, steps: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: of the weights, and from the second step on of AdamW's moments."""
    found = [group.update(make_batch(step), policy_loss()) for step in steps]
    return [(metrics["loss"], metrics["grad_norm"]) for metrics in found]


@pytest.mark.slow
def test_a_collective_that_a_rank_does_not_reach_fails_in_time(ray_cluster: Any, checkpoint: Path) -> None:
    """A rank that is late, and a stopped one, which is named."""
    seconds = 20.0  # that ranks may lie apart when they start

    def come_late(worker: Any) -> None:
        time.sleep((seconds + 5) * dist.get_rank())
        if dist.get_rank() == 0:
            dist.barrier()

    def stop_on_rank_1(worker: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    resources = Resources(device="cpu", strategy="SPREAD")
    with RayModelGroup(
        Actor, ParallelDims(dp=2), checkpoint, resources=resources, name="late", collective_timeout=seconds
    ) as group:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed out") as late:
            group.apply(come_late)
        assert seconds <= time.monotonic() - began < LIMIT + seconds
        assert [note.splitlines()[0].partition(" (")[0] for note in late.value.__notes__] == ["on rank 0"]
        with pytest.raises(RankFailed, match="apply failed on ranks 0 alone, so the ranks no longer agree"):
            group.log_probs(make_batch(0))
        group.restart()
        began = time.monotonic()
        with pytest.raises(RankDied, match=r"^rank 1 \(node .*\) is stopped: process \d+ waits for SIGCONT") as stop:
            group.apply(stop_on_rank_1)
        assert stop.value.rank == 1
        assert time.monotonic() - began < seconds + DEATH_SECONDS, "it does not wait for the other ranks"
        group.restart()
        assert group.log_probs(make_batch(0)).log_probs.isfinite().all()


@pytest.mark.slow
def test_a_lost_node_is_named_and_another_takes_its_place(ray_cluster: Any, checkpoint: Path, tmp_path: Path) -> None:
    def meet(worker: Any, folder: Path) -> None:
        (folder / f"rank {dist.get_rank()}").touch()
        time.sleep(600 if dist.get_rank() == 1 else 0)
        dist.barrier()

    spare = {**NODE, "resources": {"spare": 1}}
    nodes = [ray_cluster.add_node(**spare) for _ in range(2)]
    resources = Resources(device="cpu", strategy="STRICT_SPREAD", extra={"spare": 1.0}, timeout=60.0)
    try:
        with RayModelGroup(Actor, ParallelDims(dp=2), checkpoint, resources=resources) as group:
            lost = group.seats[1].node
            train(group, range(1))
            group.save_training(tmp_path / "run")
            expected = train(group, range(1, 3))
            future: Any = group.submit("apply", meet, tmp_path)
            while len(list(tmp_path.glob("rank *"))) < 2:
                time.sleep(0.05)
            (node,) = (node for node in nodes if node.node_id == lost)
            nodes.remove(node)
            ray_cluster.remove_node(node, allow_graceful=False)
            began = time.monotonic()
            with pytest.raises(RankDied, match=r"rank 1 \(node .*\) died during Actor.apply"):
                future.result()
            assert time.monotonic() - began < LIMIT
            nodes.append(ray_cluster.add_node(**spare))
            assert group.restart().step == 1
            assert lost not in {seat.node for seat in group.seats}
            assert train(group, range(1, 3)) == expected
    finally:
        for node in nodes:
            ray_cluster.remove_node(node)
