"""An actor and a critic with adapters on one frozen base compute and learn as two models with a base each."""

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
from parallel_layers.model import LoraOptions
from parallel_layers.module import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.api.worker import Worker
from rl_models.losses import LossTerms

OF_ACTOR, OF_CRITIC = LoraOptions(rank=2, alpha=4, seed=1), LoraOptions(rank=3, targets=["q_proj", "up_proj"], seed=2)
OPTIMIZER = OptimizerOptions(learning_rate=1e-2)
GRIDS = [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp=2)]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def batch_of(worker: Worker) -> Batch:
    sequences = [torch.arange(length) % 61 for length in (5, 7, 4, 6)]
    dims = worker.grid.dims
    own = list(range(worker.grid.rank("dp"), 4, dims.dp))
    return Batch.from_sequences(sequences, response_lengths=[3, 4, 2, 4]).select(own)


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def value_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - 1).square())


def learned(worker: Worker, loss: Any) -> dict[str, Tensor]:
    """Take a step, and return this rank's gradients."""
    gradients, step = {}, worker.optimizer.step

    def look(rate: float) -> float:
        named = worker.engine.module.named_parameters()
        found = ((name, getattr(p, "main_grad", p.grad)) for name, p in named)  # Megatron-Core has buffers
        gradients.update({name: local(gradient).clone() for name, gradient in found if gradient is not None})
        return step(rate)

    worker.optimizer.step = look  # type: ignore[method-assign]
    worker.update(batch_of(worker), loss)
    worker.optimizer.step = step  # type: ignore[method-assign]
    return gradients


def size(*workers: Worker, trained: bool = False) -> int:
    """The bytes of this rank's parameters, or of those alone that are trained, each storage once."""
    parameters = (parameter for worker in workers for parameter in worker.engine.module.parameters())
    found = (local(p).untyped_storage() for p in parameters if p.requires_grad or not trained)
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def compare(
    group: ProcessGroup | None, folder: Path, dims: ParallelDims, out: Path, backend: str = "parallel"
) -> tuple[int, int, int]:
    """The bytes of both models' parameters, of the actor's, and of the adapters and the head of the critic."""
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        return compared(folder, dims, out, backend)


def compared(folder: Path, dims: ParallelDims, out: Path, backend: str) -> tuple[int, int, int]:
    options = {"dims": dims, "mesh": mesh_of(dims), "device": "cpu", "optimizer": OPTIMIZER, "backend": backend}
    actor, other = (Actor.from_pretrained(folder, lora=OF_ACTOR, **options) for _ in range(2))
    critic = Critic.sharing_base(actor, lora=OF_CRITIC, optimizer=OPTIMIZER)
    apart = Critic.from_pretrained(folder, lora=OF_CRITIC, **options)
    reference = actor.log_probs(batch_of(actor), adapters=False).log_probs
    for _ in range(2):
        for ours, theirs, loss in ((actor, other, policy_loss), (critic, apart, value_loss)):
            gradients, expected = learned(ours, loss), learned(theirs, loss)
            assert gradients.keys() == expected.keys()
            assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
        assert torch.equal(actor.log_probs(batch_of(actor)).log_probs, other.log_probs(batch_of(actor)).log_probs)
        assert torch.equal(critic.values(batch_of(critic)), apart.values(batch_of(critic)))
    assert critic.values(batch_of(critic)).any()
    assert torch.equal(actor.log_probs(batch_of(actor), adapters=False).log_probs, reference)
    for worker, name in ((actor, "actor"), (other, "other"), (critic, "critic"), (apart, "apart")):
        worker.save_adapter(out / name)
    again = Critic.sharing_base(actor, lora=out / "critic")
    assert torch.equal(again.values(batch_of(again)), apart.values(batch_of(critic)))
    return size(actor, critic), size(actor), size(critic, trained=True)


def check(results: list[tuple[int, int, int]], out: Path) -> None:
    for both, of_actor, own in results:
        assert both == of_actor + own
        assert own < of_actor / 3
    for ours, theirs in (("actor", "other"), ("critic", "apart")):
        files = [(out / name / "adapter_model.safetensors").read_bytes() for name in (ours, theirs)]
        assert files[0] == files[1]


def test_a_critic_on_the_base_of_an_actor(tiny: Callable[..., Path], tmp_path: Path) -> None:
    check([compare(None, tiny("llama"), ParallelDims(), tmp_path)], tmp_path)


@pytest.mark.parametrize(
    "dims", [GRIDS[0], *(pytest.param(dims, marks=pytest.mark.slow) for dims in GRIDS[1:])], ids=str
)
def test_on_every_grid(ranks: RankPool, tiny: Callable[..., Path], dims: ParallelDims, tmp_path: Path) -> None:
    check(ranks.run(compare, tiny("llama"), dims, tmp_path, world=2), tmp_path)


@pytest.mark.slow
def test_on_the_patched_model(ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check([compare(None, tiny("llama"), ParallelDims(), tmp_path, "transformers")], tmp_path)
    check(ranks.run(compare, tiny("llama"), ParallelDims(dp=2), tmp_path, "transformers", world=2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(), *GRIDS], ids=str)
def test_on_megatron_core(ranks: RankPool, tiny: Callable[..., Path], dims: ParallelDims, tmp_path: Path) -> None:
    check(ranks.run(compare, tiny("llama"), dims, tmp_path, "megatron", world=dims.world_size), tmp_path)
    with pytest.raises(ValueError, match=r"the base lacks 0\.output_layer\.weight"):
        ranks.run(without_a_head, tiny("llama"), world=1)


def without_a_head(group: ProcessGroup, folder: Path) -> None:
    with cpu_stand_in():
        Actor.sharing_base(
            Critic.from_pretrained(folder, lora=OF_CRITIC, backend="megatron", device="cpu"), lora=OF_ACTOR
        )


def test_offloading_moves_the_base_once(tiny: Callable[..., Path]) -> None:
    actor = Actor.from_pretrained(tiny("llama"), lora=OF_ACTOR, optimizer=OPTIMIZER)
    critic = Critic.sharing_base(actor, lora=OF_CRITIC, optimizer=OPTIMIZER)
    learned(critic, value_loss)
    expected = critic.values(batch_of(critic))
    of_critic = critic.offload(optimizer=False)
    assert of_critic < actor.offload(optimizer=False) / 3
    critic.onload()
    with pytest.raises(RuntimeError, match="a forward pass on a shared base needs the weights on the device"):
        critic.values(batch_of(critic))
    actor.onload()
    assert torch.equal(critic.values(batch_of(critic)), expected)


def test_mistakes_are_refused(tiny: Callable[..., Path]) -> None:
    plain = Actor.from_pretrained(tiny("llama"), optimizer=OPTIMIZER)
    with pytest.raises(ValueError, match="the model has no adapters; load it with from_pretrained"):
        Critic.sharing_base(plain, lora=OF_CRITIC)
    critic = Critic.from_pretrained(tiny("llama"), lora=OF_CRITIC, optimizer=OPTIMIZER)
    with pytest.raises(
        ValueError, match=r"the base lacks lm_head.weight \(1 tensors in all\); load the model that has"
    ):
        Actor.sharing_base(critic, lora=OF_ACTOR)
    with pytest.raises(ValueError, match=r"lora=None must be LoraOptions\(...\), or a folder"):
        Actor.sharing_base(critic, lora=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=0 must be at least 1"):
        Actor.sharing_base(critic, lora=OF_ACTOR, max_tokens_per_micro_batch=0)
    joint = ActorCritic.sharing_base(Actor.from_pretrained(tiny("qwen2"), lora=OF_ACTOR), lora=OF_ACTOR)
    assert not joint.values(batch_of(joint)).any()
