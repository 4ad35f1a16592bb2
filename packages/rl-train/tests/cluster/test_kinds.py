"""Kinds of group: both heads on one backbone, a mixture of experts, another backend, models on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallel_layers import ParallelDims
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.api import Worker
from rl_models.losses import LossTerms
from rl_train import Placement, RayModelGroup, Resources

LENGTHS = (11, 1, 17, 6, 0, 9)
# With so large an epsilon the first step is proportional to the gradient: weights after it show every gradient.
OPTIMIZER = OptimizerOptions(learning_rate=100.0, eps=100.0, max_grad_norm=1e9)
ON_CPUS = Resources(device="cpu", cpus=0.5, strategy="SPREAD")


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    fields = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in ("a", "b", "c")}
    return Batch.from_sequences(rows, **fields)


def policy_loss() -> Callable[..., LossTerms]:
    """Nested, as the next one, since the nodes can not import this file."""
    return lambda inputs: LossTerms(inputs.log_probs * inputs["a"] + inputs.entropy * inputs["b"])


def value_loss() -> Callable[..., LossTerms]:
    return lambda inputs: LossTerms((inputs.values - inputs["c"]).square())


def joint_loss() -> Callable[..., LossTerms]:
    def loss(inputs: LossInputs) -> LossTerms:
        return LossTerms(
            inputs.log_probs * inputs["a"] + inputs.entropy * inputs["b"] + (inputs.values - inputs["c"]).square()
        )

    return loss


def with_value_head(kind: type[Worker], path: Path, loss: Callable[..., LossTerms], folder: Path) -> Path:
    """Save a value head that is not zero, from a step of its own: only through such do gradients reach further."""
    one = kind.from_pretrained(path, device="cpu", optimizer=OptimizerOptions(learning_rate=0.1))
    one.update(make_batch(), loss)  # type: ignore[attr-defined]
    one.save_pretrained(folder / "before")
    return folder / "before"


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Each tensor of a tuple, per element, on the CPU."""
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cpu"
        torch.testing.assert_close(one, other.cpu(), rtol=0, atol=tolerance)


def learn_the_same(
    group: RayModelGroup, one: Any, batch: Batch, loss: Callable[..., LossTerms], folder: Path, tolerance: float = 1e-5
) -> None:
    """One step of both, of the loss, and where it moved every parameter of the checkpoint to."""
    before = load_file(folder / "before" / "model.safetensors")
    found = group.update(batch, loss)
    assert found == pytest.approx(one.update(batch, loss), rel=1e-4, abs=tolerance)
    for worker, name in ((group, "group"), (one, "one")):
        worker.save_pretrained(folder / name)
    after, expected = (load_file(folder / name / "model.safetensors") for name in ("group", "one"))
    assert after.keys() == expected.keys() == before.keys()
    for name, tensor in expected.items():
        assert (tensor - before[name]).abs().max() > 10 * tolerance, name
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(dp=2), ParallelDims(dp=2, tp=2)], ids=str)
def test_one_backbone_says_and_learns_what_it_does_in_one_process(
    ray_cluster: Any, checkpoint: Path, tmp_path: Path, dims: ParallelDims
) -> None:
    path, batch = with_value_head(ActorCritic, checkpoint, joint_loss(), tmp_path), make_batch()
    one = ActorCritic.from_pretrained(path, optimizer=OPTIMIZER)
    assert one.values(batch).abs().max() > 0.01
    with RayModelGroup(ActorCritic, dims, path, resources=ON_CPUS, optimizer=OPTIMIZER) as group:
        close(group.predict(batch, temperature=0.7).values(), one.predict(batch, temperature=0.7).values())
        close(group.log_probs(batch), one.log_probs(batch))
        close([group.values(batch)], [one.values(batch)])
        learn_the_same(group, one, batch, joint_loss(), tmp_path)
        close(group.predict(batch).values(), one.predict(batch).values())


@pytest.mark.slow
def test_a_mixture_of_experts_replays_its_routing(ray_cluster: Any, mixture: Path, tmp_path: Path) -> None:
    """On dp 2 x ep 2, where either rank holds half of the experts."""
    (tmp_path / "before").symlink_to(mixture)
    one, batch = Actor.from_pretrained(mixture, optimizer=OPTIMIZER), make_batch()
    with RayModelGroup(
        Actor, ParallelDims(dp=2, ep=2), mixture, resources=ON_CPUS, optimizer=OPTIMIZER, max_tokens_per_micro_batch=17
    ) as group:
        assert group.apply(lambda worker: (worker.grid.group("ep").size(), worker.grid.rank("ep"))) == [(2, 0), (2, 1)]
        own, expected = (worker.predict(batch, record_routing=True) for worker in (group, one))
        names = ("log_probs", "entropy")
        close([own[name] for name in names], [expected[name] for name in names])
        assert own["routing"].shape == (sum(LENGTHS), 2, 2)  # layer 1 is dense
        assert own["routing"].dtype == torch.int16
        assert torch.equal(own["routing"].sort(-1).values, expected["routing"].sort(-1).values)

        close(group.log_probs(batch.with_fields(routing=own["routing"])), [own[name] for name in names])
        other = (own["routing"] + 1) % 4
        other[3] = -1  # an engine that does not know
        replayed = batch.with_fields(routing=other)
        assert (one.log_probs(replayed).log_probs - own["log_probs"]).abs().max() > 1e-3
        close(group.log_probs(replayed), one.log_probs(replayed))
        learn_the_same(group, one, replayed, policy_loss(), tmp_path)
        close(group.log_probs(replayed), one.log_probs(replayed))


@pytest.mark.slow
def test_the_transformers_backend(ray_cluster: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Its numbers; and its weights, streamed on every rank and saved in the background."""
    (tmp_path / "before").symlink_to(checkpoint)
    options: dict[str, Any] = {"backend": "transformers", "optimizer": OPTIMIZER}
    one, batch = Actor.from_pretrained(checkpoint, **options), make_batch()
    with RayModelGroup(Actor, ParallelDims(dp=2), checkpoint, resources=ON_CPUS, **options) as group:
        close(group.log_probs(batch), one.log_probs(batch))
        learn_the_same(group, one, batch, policy_loss(), tmp_path)
        learned = load_file(tmp_path / "group" / "model.safetensors")
        for streamed in group.apply(lambda worker: {name: tensor.clone() for name, tensor in worker.stream_weights()}):
            assert streamed.keys() == learned.keys()
            assert all(torch.equal(streamed[name], tensor) for name, tensor in learned.items())

        found = group.log_probs(batch)
        group.save_training(tmp_path / "run", asynchronous=True, extra={"position": 3})
        group.update(batch, policy_loss())
        group.wait_for_save()
        resumed = group.load_training(tmp_path / "run")
        assert (resumed.step, resumed.extra) == (1, {"position": 3})
        assert all(map(torch.equal, group.log_probs(batch), found))


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu(2))]
)
def test_two_groups_on_the_same_devices(ray_cluster: Any, checkpoint: Path, tmp_path: Path, device: str) -> None:
    """An actor on dp 2 beside a critic on tp 2, with half of either device each."""
    tolerance = 1e-5 if device == "cpu" else 1e-4  # a GPU adds up in another order on every grid
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "before").symlink_to(checkpoint)
    valued, batch = with_value_head(Critic, checkpoint, value_loss(), tmp_path / "critic"), make_batch()
    one = Actor.from_pretrained(checkpoint, device=device, optimizer=OPTIMIZER)
    judge = Critic.from_pretrained(valued, device=device, optimizer=OPTIMIZER)
    # The cluster says of each of its nodes that it has two GPUs: within one node they are two.
    with Placement(2, Resources(device=device, strategy="STRICT_PACK")) as placement:
        options: dict[str, Any] = {"resources": placement.share(0.5), "optimizer": OPTIMIZER, "wait": False}
        with (
            RayModelGroup(Actor, ParallelDims(dp=2), checkpoint, **options) as actor,
            RayModelGroup(Critic, ParallelDims(tp=2), valued, **options) as critic,
        ):
            for group in (actor, critic):
                assert group.apply(lambda worker: worker.device.type) == [device] * 2
                assert [seat.device for seat in group.seats] == (["0", "1"] if device == "cuda" else ["", ""])
            values = critic.submit("values", batch)
            close(actor.log_probs(batch), one.log_probs(batch), tolerance)
            close([values.result()], [judge.values(batch)], tolerance)
            learn_the_same(actor, one, batch, policy_loss(), tmp_path / "actor", tolerance)
            learn_the_same(critic, judge, batch, value_loss(), tmp_path / "critic", tolerance)
            generated = actor.generate([[5], [6, 7, 8], [9, 10]], max_new_tokens=3, n=2, seed=1)
            assert generated.tokens.device.type == "cpu"
            again = actor.log_probs(generated).log_probs
            close([generated["log_probs"]], [torch.where(generated.mask, again, 0)], tolerance)
            given_up = actor.offload()
            assert given_up > 0
            actor.onload()
            close(actor.log_probs(batch), one.log_probs(batch), tolerance)
