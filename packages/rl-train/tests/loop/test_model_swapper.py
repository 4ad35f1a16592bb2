"""Models that take swapper: one is on the device at a time, and every number is what it is without swapper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_models import Actor, Critic, LossInputs, OptimizerOptions, losses
from rl_models.api import ModelCalls, WholeBatches, Worker
from rl_train.loop.model_swapper import ModelSwapper


def held(worker: Worker) -> tuple[bool, bool]:
    """Whether weights, and whether optimizer state, take memory on the device."""
    weights = sum(parameter.untyped_storage().nbytes() for parameter in worker.engine.module.parameters())
    held = worker.optimizer.tensors() if "optimizer" in vars(worker) else ()
    state = sum(tensor.untyped_storage().nbytes() for tensor in held)
    return weights > 0, state > 0


def learn(actor: ModelCalls, critic: ModelCalls, reference: ModelCalls) -> list[float]:
    batch = actor.generate([[1, 4], [1, 5, 6]], max_new_tokens=4, n=2, seed=1)
    fields = {"old_log_probs": actor.log_probs(batch).log_probs, "old_values": critic.values(batch)}
    fields["advantages"] = reference.log_probs(batch).log_probs - fields["old_values"]
    batch = batch.with_fields(**fields)

    def policy_loss(inputs: LossInputs) -> losses.LossTerms:
        return losses.ppo_clip(inputs.log_probs, inputs["old_log_probs"], inputs["advantages"])

    def value_loss(inputs: LossInputs) -> losses.LossTerms:
        return losses.value_clip(inputs.values, inputs["old_values"], inputs["old_values"] + 1)

    return [
        number
        for _ in range(2)
        for worker, loss in ((actor, policy_loss), (critic, value_loss))
        for number in (worker.update(batch, loss)["loss"], worker.update(batch, loss)["grad_norm"])
    ]


def test_one_model_is_there_at_a_time_and_learns_the_same(model: Path) -> None:
    options = OptimizerOptions(learning_rate=1e-2)
    kinds: tuple[type[Worker], ...] = (Actor, Critic, Actor)

    def load() -> list[WholeBatches]:
        return [WholeBatches(kind.from_pretrained(model, optimizer=options, device="cpu")) for kind in kinds]

    expected = learn(*load())
    swapper, models = ModelSwapper(), load()
    workers = [model.worker for model in models]
    actor, critic, reference = (swapper.add(model) for model in models)
    assert [held(worker) for worker in workers] == [(False, False)] * 3
    assert learn(actor, critic, reference) == expected
    assert [held(worker) for worker in workers] == [(False, False), (True, True), (False, False)]
    # The optimizer's state stays on the host until it is needed.
    actor.generate([[1]], max_new_tokens=1)
    assert [held(worker) for worker in workers] == [(True, False), (False, False), (False, False)]
    assert workers[0].steps == 4


def test_a_model_that_is_away_can_not_be_used(model: Path) -> None:
    worker = Actor.from_pretrained(model, device="cpu")
    ModelSwapper().add(WholeBatches(worker))
    with pytest.raises(RuntimeError, match="needs the weights on the device"):
        worker.generate([[1]], max_new_tokens=1)


@pytest.mark.gpu(1)
def test_what_is_given_up_is_there_for_other_processes(model: Path) -> None:
    worker = Actor.from_pretrained(model, device="cuda")
    kept = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del kept  # torch's allocator has it still
    reserved = torch.cuda.memory_reserved()
    worker.offload()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28)
