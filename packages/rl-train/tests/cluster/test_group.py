"""Groups on two nodes of a real Ray cluster: an actor on dp 2 and a critic on tp 2, on shared devices.

The last two tests kill and end the ranks of the actor.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions, losses
from rl_models.calls import dispatched, per_sequence
from rl_train import Placement, RankDied, RayModelGroup, Resources
from rl_train.cluster import future
from rl_train.processes.errors import RankFailed

Pair = tuple[RayModelGroup, RayModelGroup]
LENGTHS = (11, 1, 17, 6, 0, 9)
# Seconds of a call in which a rank dies.
LIMIT = 60.0
OPTIMIZER = OptimizerOptions(learning_rate=0.1, eps=1.0)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    names = ("old_log_probs", "advantages", "old_values", "returns")
    fields = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in names}
    return Batch.from_sequences(rows, response_lengths=[7, 0, 12, 5, 0, 3], **fields)


def policy_loss() -> Callable[..., losses.LossTerms]:
    """Nested, since the nodes can not import this file."""

    def loss(inputs: LossInputs) -> losses.LossTerms:
        return losses.ppo_clip(
            inputs.log_probs, inputs["old_log_probs"] - 4, inputs["advantages"], clip_low=0.9, clip_high=50
        )

    return loss


def surprised_actor() -> type[Actor]:
    """A user's subclass with a method of its own; nested, too."""

    class Surprised(Actor):
        @dispatched(per_sequence)
        def surprise(self, batch: Batch) -> Tensor:
            return -batch.sum_by_sequence(self.log_probs(batch).log_probs)

    return Surprised


@pytest.fixture(scope="module")
def pair(ray_cluster: Any, checkpoint: Path) -> Iterator[Pair]:
    resources = Resources(device="cpu", strategy="SPREAD", env={"CHOSEN": "by the user"})
    with Placement(2, resources) as placement:
        options: dict[str, Any] = {"resources": placement.share(0.5), "optimizer": OPTIMIZER, "wait": False}
        with RayModelGroup(surprised_actor(), ParallelDims(dp=2), checkpoint, name="actor", **options) as actor:
            with RayModelGroup(Critic, ParallelDims(tp=2), checkpoint, name="critic", **options) as critic:
                yield actor, critic


def test_results_are_those_of_one_process(pair: Pair, checkpoint: Path) -> None:
    actor, critic = pair
    batch = make_batch()
    one = Actor.from_pretrained(checkpoint, optimizer=OPTIMIZER)
    judge = Critic.from_pretrained(checkpoint, optimizer=OPTIMIZER)

    def value_loss(inputs: LossInputs) -> losses.LossTerms:
        return losses.value_clip(inputs.values, inputs["old_values"], inputs["returns"])

    for _ in range(2):  # before and after a step
        for found, expected in zip(actor.log_probs(batch), one.log_probs(batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(critic.values(batch), judge.values(batch), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(critic.rewards(batch), judge.rewards(batch), rtol=1e-5, atol=1e-5)
        learned, valued = actor.submit("update", batch, policy_loss()), critic.submit("update", batch, value_loss)
        assert learned.result() == pytest.approx(one.update(batch, policy_loss()), rel=1e-4, abs=1e-6)
        assert valued.result() == pytest.approx(judge.update(batch, value_loss), rel=1e-4, abs=1e-6)


def test_a_method_of_a_subclass_is_divided_and_joined(pair: Pair) -> None:
    actor, critic = pair
    batch = make_batch()
    expected = -batch.sum_by_sequence(actor.log_probs(batch).log_probs)
    torch.testing.assert_close(actor.call("surprise", batch), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"Critic has no method 'surprise' for groups; .*; declare a method with"):
        critic.call("surprise", batch)


def test_a_part_is_stored_once_for_all_its_ranks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    stored: list[Any] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: (stored.append(value), put(value))[1])
    for group, dp in zip(pair, (2, 1), strict=True):
        group.submit("log_probs" if dp == 2 else "values", make_batch()).result()
        parts = [len(value) for value in stored if isinstance(value, Batch)]
        assert len(parts) == dp
        assert sum(parts) == len(LENGTHS)
        stored.clear()


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(dp=2, tp=2)], ids=str)
def test_every_axis(ray_cluster: Any, checkpoint: Path, dims: ParallelDims) -> None:
    batch = make_batch()
    one = Actor.from_pretrained(checkpoint, optimizer=OPTIMIZER)
    resources = Resources(device="cpu", cpus=0.5, strategy="SPREAD")
    with RayModelGroup(Actor, dims, checkpoint, resources=resources, optimizer=OPTIMIZER) as group:
        assert group.update(batch, policy_loss()) == pytest.approx(one.update(batch, policy_loss()), rel=1e-4, abs=1e-6)
        found = group.log_probs(batch)
        torch.testing.assert_close(found.log_probs, one.log_probs(batch).log_probs, rtol=1e-5, atol=1e-5)


def test_responses_are_in_the_order_of_the_prompts(pair: Pair) -> None:
    actor, _ = pair
    prompts = [[5], [6, 7, 8], torch.tensor([9, 10])]
    batch = actor.generate(prompts, max_new_tokens=3, n=2, seed=1, stop_ids={0})
    assert [row[: len(prompts[i // 2])].tolist() for i, row in enumerate(batch.split())] == [
        list(prompts[i // 2]) for i in range(6)
    ]
    torch.testing.assert_close(
        batch["log_probs"], torch.where(batch.mask, actor.log_probs(batch).log_probs, 0), rtol=0, atol=1e-5
    )
    # Fewer prompts than data-parallel ranks.
    assert len(actor.generate([[3]], max_new_tokens=2)) == 1


def test_a_checkpoint_is_saved(pair: Pair, tmp_path: Path) -> None:
    actor, _ = pair
    actor.save_pretrained(tmp_path / "saved")
    batch = make_batch()
    saved = Actor.from_pretrained(tmp_path / "saved").log_probs(batch)
    torch.testing.assert_close(actor.log_probs(batch).log_probs, saved.log_probs, rtol=1e-5, atol=1e-5)


def test_actor_and_critic_run_at_the_same_time(pair: Pair, tmp_path: Path) -> None:
    def meet(worker: Any, mine: Path, others: Path) -> bool:
        mine.touch()
        deadline = time.monotonic() + 20
        while not others.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return others.exists()

    files = tmp_path / "actor", tmp_path / "critic"
    futures = [group.submit("apply", meet, *order) for group, order in zip(pair, (files, files[::-1]), strict=True)]
    assert [future.result(timeout=60) for future in futures] == [[True, True], [True, True]]
    assert all(future.done() for future in futures)


def test_a_result_that_is_late_can_be_waited_for_again(pair: Pair, tmp_path: Path) -> None:
    def wait_for(worker: Any, file: Path) -> str:
        while not file.exists():
            time.sleep(0.01)
        return "done"

    late = pair[0].submit("apply", wait_for, tmp_path / "go")
    with pytest.raises(TimeoutError, match=r"actor.apply did not end within 0.2 s; ranks \[0, 1\] still run"):
        late.result(timeout=0.2)
    assert not late.done()
    threading.Timer(0.1, (tmp_path / "go").touch).start()
    assert late.result(timeout=60) == ["done", "done"]


def test_where_the_ranks_are(pair: Pair) -> None:
    actor, critic = pair
    # SPREAD over two nodes, and both groups on the same devices, in processes of their own.
    assert len({seat.node for seat in actor.seats}) == 2
    assert [seat.node for seat in actor.seats] == [seat.node for seat in critic.seats]
    assert len({seat.pid for group in pair for seat in group.seats} | {os.getpid()}) == 5

    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "CHOSEN",
    )

    def environment(worker: Any) -> tuple[list[str], int, str]:
        return [os.environ[name] for name in names], torch.get_num_threads(), os.environ["MASTER_PORT"]

    found = actor.apply(environment)
    port = str(actor.seats[0].port)
    assert found == [([str(rank), "2", "0", "1", "1", "", "by the user"], 1, port) for rank in range(2)]
    assert critic.apply(environment)[0][2] == str(critic.seats[0].port) != port


@pytest.mark.parametrize("method", ["begin", "load"])
def test_an_engine_on_ray_that_ends_and_one_that_refuses(
    pair: Pair, checkpoint: Path, tmp_path: Path, method: str
) -> None:
    """The first starts again, gets the newest weights, and its requests are repeated; then a transfer breaks off."""
    from .engines import PROMPTS, SAMPLING, Case

    actor, _ = pair
    with Placement(1, Resources(device="cpu")) as placement:
        case = Case(actor, checkpoint, placement, tmp_path / "mark")
        case.mark.write_text(f"{method} 9")
        case.engine.update_weights(actor, 1)
        assert case.is_right()
        (told,) = case.told
        asked = {"begin": "generate", "load": "load"}[method]
        assert re.match(
            rf"engine 0 \(node .*\) ended its process \(ActorDiedError: .*\) during {asked}; it starts again", told
        )
        case.mark.write_text("load refuse")
        with pytest.raises(RuntimeError, match="update to version 2 failed: no room for the sixth tensor"):
            case.engine.update_weights(actor, 2)
        with pytest.raises(RuntimeError, match="does not generate: the update to version 2 failed"):
            case.engine.generate(PROMPTS, SAMPLING)
        case.engine.update_weights(actor, 3)
        assert case.is_right(3)
        case.engine.close()
        assert placement.free == [1.0]


def test_a_mistake_keeps_its_type_and_text(pair: Pair) -> None:
    actor, critic = pair
    with pytest.raises(ValueError, match="the batch has no field 'nothing'") as mistake:
        critic.update(
            make_batch(), lambda inputs: losses.value_clip(inputs.values, inputs["nothing"], inputs["returns"])
        )
    notes = "\n".join(mistake.value.__notes__)
    assert "on rank 0 (node " in notes
    assert "on rank 1 (node " in notes
    assert "in update:\nTraceback" in notes
    with pytest.raises(ValueError, match=r"Surprised has no method 'values' .*; it has surprise, .*log_probs"):
        actor.submit("values", make_batch())
    with pytest.raises(ValueError, match="the loss must be one number per token"):
        actor.update(make_batch(), lambda inputs: losses.LossTerms(inputs.log_probs.sum()))
    # The groups go on.
    assert critic.values(make_batch()).shape == actor.log_probs(make_batch()).entropy.shape


def test_a_call_behind_a_failed_one_is_not_run(pair: Pair) -> None:
    actor, _ = pair

    def fail(worker: Any) -> None:
        raise ZeroDivisionError("the reason")

    first, second = actor.submit("apply", fail), actor.submit("apply", lambda worker: "run")
    with pytest.raises(ZeroDivisionError, match="the reason") as skipped:
        second.result()
    assert "actor.apply was not run after that" not in str(skipped.value.__notes__)  # the same method's name
    with pytest.raises(ZeroDivisionError, match="the reason"):
        first.result()
    assert actor.apply(lambda worker: "run") == ["run", "run"]


def test_a_result_that_cannot_travel_is_a_mistake_and_no_dead_rank(pair: Pair) -> None:
    actor, _ = pair
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as mistake:
        actor.apply(lambda worker: threading.Lock())
    assert "on rank 1 (node " in "\n".join(mistake.value.__notes__)
    assert torch.equal(actor.apply(lambda worker: torch.ones(2, requires_grad=True))[1], torch.ones(2))


def killing_loss() -> Callable[..., losses.LossTerms]:
    def loss(inputs: LossInputs) -> losses.LossTerms:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses.ppo_clip(inputs.log_probs, inputs.log_probs.detach(), inputs["advantages"])

    return loss


def train(group: RayModelGroup, steps: int) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step: they show the weights and AdamW's moments."""
    found = [group.update(make_batch(), policy_loss()) for _ in range(steps)]
    return [(metrics["loss"], metrics["grad_norm"]) for metrics in found]


def test_a_killed_rank_is_named_and_the_run_goes_on_with_the_same_losses(pair: Pair, tmp_path: Path) -> None:
    group = pair[0]
    train(group, 2)
    with pytest.raises(ValueError, match="has been updated and has no training checkpoint; call save"):
        group.restart()
    group.save_training(tmp_path / "run")
    steps = int((tmp_path / "run" / "latest").read_text().removeprefix("step-"))
    expected = train(group, 3)
    pids = [seat.pid for seat in group.seats]

    began = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1 \(node .*\) died during actor.update") as death:
        group.update(make_batch(), killing_loss())
    assert time.monotonic() - began < LIMIT
    assert (death.value.rank, death.value.node, death.value.method) == (1, group.seats[1].address, "update")
    with pytest.raises(
        RankFailed, match=r"actor.log_probs cannot run: rank 1 .* died or was stopped during update; call restart"
    ):
        group.log_probs(make_batch())

    assert group.restart().step == steps
    assert not set(pids) & {seat.pid for seat in group.seats}
    assert train(group, 3) == expected


def test_ranks_that_wait_for_one_that_failed_are_named_and_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future, "REPORT_SECONDS", 1.0)  # the other rank has nothing to report

    def fail_on_rank_1(worker: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the reason")
        dist.barrier()

    group, began = pair[0], time.monotonic()
    with pytest.raises(ValueError, match="the reason"):
        group.apply(fail_on_rank_1)
    assert time.monotonic() - began < LIMIT
    with pytest.raises(RankFailed, match="apply failed on ranks 1 alone, so the ranks no longer agree; call restart"):
        group.log_probs(make_batch())

    pids = [seat.pid for seat in group.seats]
    group.shutdown()
    group.shutdown()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() - began < LIMIT:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert group.placement.free == [0.5, 0.5], "the critic has its half still"
    with pytest.raises(ValueError, match="actor has been shut down"):
        group.log_probs(make_batch())
