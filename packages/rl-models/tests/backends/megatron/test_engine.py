"""`backend="megatron"`: its global state, its weights on their way, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt import Checkpoint
from megatron_utils import megatron_grid
from megatron_utils.testing import cpu_stand_in, tiny_config
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.moe import RouterReplay
from parallel_layers.testing import RankPool
from parallel_models import Grid, MicroBatch, PipelineOptions
from rl_models import Actor, Batch, LossInputs
from rl_models.backends import BackendOptions
from rl_models.losses import LossTerms


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", num_hidden_layers=4)


@pytest.fixture(scope="session")
def mixture(tiny: Callable[..., Path]) -> Path:
    return tiny("mixture", num_hidden_layers=4)


def save(config: dict[str, Any], path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(path)
    return path


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.from_sequences([torch.randint(37, (n,), generator=generator) for n in (7, 3, 12, 5)])


def actor_on(path: Path, dims: ParallelDims, **options: Any) -> Actor:
    mesh = mesh_of(dims)
    return Actor.from_pretrained(path, backend="megatron", dims=dims, mesh=mesh, device="cpu", **options)


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def two_grids_on(group: ProcessGroup, path: Path) -> None:
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


def side_by_side_on(group: ProcessGroup, path: Path) -> Tensor:
    """An actor on rank 0, and one on ranks 1 and 2, learn the same from the same batch."""
    members = [0] if group.rank() == 0 else [1, 2]
    dims, batch = ParallelDims(tp=len(members)), make_batch()
    mesh = dims.build_mesh("cpu", members) if len(members) > 1 else None
    with cpu_stand_in():
        actor = Actor.from_pretrained(path, backend="megatron", dims=dims, mesh=mesh, device="cpu")
        before = actor.log_probs(batch).log_probs
        for _ in range(2):
            actor.update(batch, loss)
        after = actor.log_probs(batch).log_probs
        assert not torch.equal(before, after)
    return after


def test_actors_learn_side_by_side_on_any_ranks(ranks: RankPool, model: Path) -> None:
    alone, *both = ranks.run(side_by_side_on, model, world=3)
    for after in both:
        torch.testing.assert_close(after, alone, rtol=0, atol=1e-5)


def accumulation_on(group: ProcessGroup, path: Path) -> None:
    with cpu_stand_in():
        engine = actor_on(path, ParallelDims(tp=2)).engine
        micro_batches = [
            MicroBatch(PackedSequence.from_sequences(make_batch().select([i]).split(), multiple_of=2)) for i in range(4)
        ]

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
    def wrong(inputs: LossInputs) -> LossTerms:
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
    packed = PackedSequence.from_sequences(make_batch().split(), multiple_of=2)
    with cpu_stand_in():
        one, other = (actor_on(path, dims).engine for dims in (ParallelDims(pp=2), ParallelDims(tp=2)))
        recording = RouterReplay()
        (own, _), *_ = one.forward([MicroBatch(packed, replay=recording)])
        assert list(recording.experts) == one.routed_layers == [0, 1, 2, 3]
        moved = {layer: (experts + 1) % 4 for layer, experts in recording.experts.items()}
        outputs = []
        for engine in (one, other):
            replay = RouterReplay(moved, num_experts=engine.num_experts)
            outputs.append(engine.forward([MicroBatch(packed, replay=replay)])[0][0])
        assert not torch.allclose(outputs[0], own)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)


def test_routing_recorded_on_one_grid_replays_on_another(ranks: RankPool, mixture: Path) -> None:
    ranks.run(routing_on, mixture, world=2)


def streamed_on(group: ProcessGroup, path: Path, out: Path, dims: ParallelDims, virtual_stages: int) -> None:
    with cpu_stand_in():
        options = {"pipeline": PipelineOptions(virtual_stages=virtual_stages)} if virtual_stages > 1 else {}
        actor = actor_on(path, dims, **options)
        actor.update(make_batch(), loss)
        # Small buckets: several exchanges.
        streamed = {name: tensor.clone() for name, tensor in actor.stream_weights(bucket_bytes=1 << 10)}
        actor.save_pretrained(out)
        to_one = dict(actor.stream_weights(to=[1], dtype=torch.bfloat16))
    saved, start = load_file(out / "model.safetensors"), load_file(path / "model.safetensors")
    assert streamed.keys() == saved.keys() == start.keys()
    assert all(torch.equal(streamed[name], saved[name]) for name in saved)
    assert any(not torch.equal(streamed[name], start[name]) for name in saved)
    assert to_one.keys() == (saved.keys() if group.rank() == 1 else set())
    assert all(torch.equal(tensor, saved[name].bfloat16()) for name, tensor in to_one.items())


@pytest.mark.parametrize(
    ("dims", "virtual_stages"),
    [
        pytest.param(ParallelDims(tp=2), 1, marks=pytest.mark.slow),
        (ParallelDims(pp=2), 2),
        (ParallelDims(dp=2, ep=2), 1),
    ],
    ids=["tp2", "pp2 vpp2", "ep2"],
)
def test_weights_are_streamed_as_they_are_saved(
    ranks: RankPool, model: Path, mixture: Path, tmp_path: Path, dims: ParallelDims, virtual_stages: int
) -> None:
    ranks.run(streamed_on, mixture if dims.ep > 1 else model, tmp_path, dims, virtual_stages, world=2)


def transformer_engine_on(group: ProcessGroup, path: Path, out: Path) -> None:
    from rl_models import MegatronOptions

    on_engine = {"megatron": MegatronOptions(layers="transformer_engine")}
    local, engine = (Actor.from_pretrained(path, backend="megatron", **options) for options in ({}, on_engine))
    expected, actual = (actor.log_probs(make_batch()) for actor in (local, engine))
    # It multiplies fp32 as TF32, whose operands have 11 bits.
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)
    engine.save_pretrained(out)
    before, after = (load_file(folder / "model.safetensors") for folder in (path, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    norm = local.update(make_batch(), loss)["grad_norm"]
    assert engine.update(make_batch(), loss)["grad_norm"] == pytest.approx(norm, rel=2e-2)
    for more in ({}, {"recompute": "full"}):
        low = Actor.from_pretrained(path, backend="megatron", float8="current", **on_engine, **more)
        assert 0 < (low.log_probs(make_batch()).log_probs - expected.log_probs).abs().mean() < 0.4
        assert low.update(make_batch(), loss)["grad_norm"] == pytest.approx(norm, rel=0.3)


@pytest.mark.gpu
def test_layers_of_transformer_engine(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine")
    # Its kernels want sides that are multiples of 16.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    save(tiny_config("llama", **sizes), tmp_path / "model")
    with RankPool(1, backend="nccl") as pool:
        pool.run(transformer_engine_on, tmp_path / "model", tmp_path / "saved")


def refused_on(group: ProcessGroup, path: Path, apertus: Path) -> list[str]:
    from rl_models.backends.megatron.load import load

    grid = Grid.build(ParallelDims(), device="cpu")
    messages = []

    def attempt(grid: Grid, options: BackendOptions, path: Path = path) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller matches
            load(Checkpoint(path), "causal_lm", grid, options)
        messages.append(str(error.value))

    attempt(grid, BackendOptions())
    with cpu_stand_in():
        attempt(grid, BackendOptions(dtype=torch.float64))
        attempt(grid, BackendOptions(pipeline=PipelineOptions(schedule="zero-bubble")))
        attempt(grid, BackendOptions(pipeline=PipelineOptions(split=[2])))
        attempt(grid, BackendOptions(), apertus)
    return messages


def test_what_it_does_not_offer_is_refused_by_name(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    apertus = save({**tiny_config("llama"), "model_type": "apertus", "hidden_act": "xielu"}, tmp_path / "apertus")
    ((cpu, dtype, schedule, split, activation),) = ranks.run(refused_on, model, apertus, world=1)
    assert cpu.startswith("backend='megatron' does not compute on device='cpu'")
    assert "cpu_stand_in()" in cpu
    assert dtype.startswith("backend='megatron' does not offer dtype=torch.float64; use torch.float32, torch.bfloat16,")
    assert schedule == (
        "backend='megatron' does not offer schedule='zero-bubble': Megatron-Core 0.16 has none; use '1f1b' "
        "(interleaved where virtual_stages > 1), or backend='parallel'"
    )
    assert split.startswith("split=[2] needs pp > 1")
    assert activation.startswith("apertus has activation='xielu' (Megatron-Core: 'silu'")


def test_a_process_group_is_needed(model: Path) -> None:
    with cpu_stand_in(), pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        Actor.from_pretrained(model, backend="megatron", device="cpu")
