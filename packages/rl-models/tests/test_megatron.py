"""What is particular to `backend="megatron"`: its global state, its weights on their way, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.moe import RouterReplay
from parallel_layers.testing import RankPool, shared_pool
from rl_models import Actor, Batch
from rl_models.backends.options import EngineOptions, PipelineOptions, RouterLosses
from rl_models.grid import Grid
from rl_models.losses import LossTerms

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    return path


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.from_sequences([torch.randint(37, (n,), generator=generator) for n in (7, 3, 12, 5)])


def actor_on(path: Path, dims: ParallelDims, **options: Any) -> Actor:
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    return Actor.from_pretrained(path, backend="megatron", dims=dims, mesh=mesh, device="cpu", **options)


def loss(log_probs: Tensor, entropy: Tensor, part: Batch) -> LossTerms:
    return LossTerms(-log_probs)


def two_grids_on(group: ProcessGroup, path: Path) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.testing import cpu_stand_in

    batch = make_batch()
    with cpu_stand_in():
        one, other = actor_on(path, ParallelDims(tp=2)), actor_on(path, ParallelDims(pp=2))
        before = one.log_probs(batch).log_probs
        for actor in (one, other, one, other):
            actor.update(batch, loss)
        after = one.log_probs(batch).log_probs
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, other.log_probs(batch).log_probs, rtol=0, atol=1e-5)
        with (
            megatron_grid(ParallelDims(tp=2), ranks=[0, 1]),
            pytest.raises(RuntimeError, match="a Megatron grid is already active"),
        ):
            one.log_probs(batch)


def test_actors_on_two_grids_live_in_one_process(ranks: RankPool, model: Path) -> None:
    ranks.run(two_grids_on, model, world=2)


def accumulation_on(group: ProcessGroup, path: Path) -> None:
    from megatron_utils.testing import cpu_stand_in

    with cpu_stand_in():
        engine = actor_on(path, ParallelDims(tp=2)).engine
        micro_batches = [make_batch().select([i]).packed(multiple_of=2) for i in range(4)]

        def gradients(*calls: range) -> list[Tensor]:
            engine.drop_gradients()
            for numbers in calls:
                part = [micro_batches[i] for i in numbers]
                engine.forward_backward(part, lambda _, outputs: outputs[0].sum())
            return [parameter.main_grad.clone() for parameter in engine.module.parameters()]

        for whole, summed in zip(gradients(range(4)), gradients(range(1), range(1, 4)), strict=True):
            torch.testing.assert_close(whole, summed, rtol=1e-5, atol=1e-5)


def test_gradients_add_up_over_calls(ranks: RankPool, model: Path) -> None:
    ranks.run(accumulation_on, model, world=2)


def failing_loss_on(group: ProcessGroup, path: Path) -> None:
    from megatron_utils.testing import cpu_stand_in

    def wrong(log_probs: Tensor, entropy: Tensor, part: Batch) -> LossTerms:
        raise ValueError("nothing to learn")

    with cpu_stand_in():
        actor = actor_on(path, ParallelDims(pp=2), max_tokens_per_micro_batch=12)
        before = actor.log_probs(make_batch()).log_probs
        with pytest.raises(ValueError, match="nothing to learn"):
            actor.update(make_batch(), wrong)
        assert torch.equal(actor.log_probs(make_batch()).log_probs, before)


def test_an_error_of_the_loss_is_raised_on_every_stage(ranks: RankPool, model: Path) -> None:
    ranks.run(failing_loss_on, model, world=2, timeout=60)


def routing_on(group: ProcessGroup, path: Path) -> None:
    from megatron_utils.testing import cpu_stand_in

    micro_batches = [make_batch().packed(multiple_of=2)]
    with cpu_stand_in():
        one, other = (actor_on(path, dims).engine for dims in (ParallelDims(pp=2), ParallelDims(tp=2)))
        recording = RouterReplay()
        with one.routing([recording]):
            (own, _), *_ = one.forward(micro_batches)
        assert list(recording.experts) == one.routed_layers == [0, 1]
        moved = {layer: (experts + 1) % 4 for layer, experts in recording.experts.items()}
        outputs = []
        for engine in (one, other):
            with engine.routing([RouterReplay(moved, num_experts=engine.num_experts)]):
                outputs.append(engine.forward(micro_batches)[0][0])
        assert not torch.allclose(outputs[0], own)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)


def test_routing_recorded_on_one_grid_replays_on_another(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).save_pretrained(tmp_path)
    ranks.run(routing_on, tmp_path, world=2)


def refused_on(group: ProcessGroup, path: Path) -> list[str]:
    from megatron_utils.testing import cpu_stand_in
    from rl_models.backends.megatron import load

    grid = Grid.build(ParallelDims(), device="cpu")
    messages = []

    def attempt(grid: Grid, options: EngineOptions) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller matches
            load(str(path), "causal_lm", grid, options)
        messages.append(str(error.value))

    attempt(grid, EngineOptions())
    with cpu_stand_in():
        attempt(grid, EngineOptions(dtype=torch.float64))
        attempt(grid, EngineOptions(pipeline=PipelineOptions(schedule="zero-bubble")))
        attempt(grid, EngineOptions(router_losses=RouterLosses(balance=0.1)))
    return messages


def test_what_it_does_not_offer_is_refused_by_name(ranks: RankPool, model: Path) -> None:
    ((cpu, dtype, schedule, losses),) = ranks.run(refused_on, model, world=1)
    assert cpu.startswith("backend='megatron' does not compute on device='cpu'")
    assert "cpu_stand_in()" in cpu
    assert dtype.startswith("backend='megatron' does not offer dtype=torch.float64; use torch.float32, torch.bfloat16,")
    assert schedule == (
        "backend='megatron' does not offer schedule='zero-bubble': Megatron-Core 0.16 has none; use '1f1b' "
        "(interleaved where virtual_stages > 1), or backend='parallel'"
    )
    assert losses.startswith("backend='megatron' does not offer RouterLosses(balance=0.1")


def test_a_process_group_is_needed(model: Path) -> None:
    from megatron_utils.testing import cpu_stand_in

    with cpu_stand_in(), pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        Actor.from_pretrained(model, backend="megatron", device="cpu")
