"""Adapters on `backend="megatron"`; `tests/test_lora.py` compares them with PEFT and with the other backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.optimizer import gradient_buffers
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_models import PipelineOptions
from rl_models import Actor, Batch, Critic, LossInputs, MegatronOptions, OptimizerOptions
from rl_models.api.worker import Worker
from rl_models.losses import LossTerms

LORA = LoraOptions(rank=2, alpha=4, seed=1)
OPTIMIZER = OptimizerOptions(learning_rate=1e-2)


def load(kind: type[Worker], path: Path, dims: ParallelDims, **options: Any) -> Any:
    """Call this inside `cpu_stand_in`."""
    options = {"lora": LORA, "optimizer": OPTIMIZER, **options}
    return kind.from_pretrained(path, backend="megatron", dims=dims, mesh=mesh_of(dims), device="cpu", **options)


def batch_of(worker: Worker | None = None) -> Batch:
    sequences = [torch.arange(length) % 61 for length in (5, 7, 4, 6)]
    batch = Batch.from_sequences(sequences, response_lengths=[3, 4, 2, 4])
    if worker is None:
        return batch
    return batch.select(list(range(worker.grid.rank("dp"), 4, worker.grid.dims.dp)))


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def value_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - 1).square())


def base_on(group: ProcessGroup, path: Path, dims: ParallelDims, dtype: torch.dtype) -> None:
    with cpu_stand_in():
        actor = load(Actor, path, dims, dtype=dtype)
        reference = load(Actor, path, dims, dtype=dtype, lora=None, optimizer=None)
        near = partial(torch.testing.assert_close, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
        batch = batch_of(actor)
        expected = reference.log_probs(batch).log_probs
        near(actor.log_probs(batch).log_probs, expected)  # B is zero at first
        before = {name: parameter.detach().clone() for name, parameter in actor.engine.module.named_parameters()}
        for _ in range(3):
            actor.update(batch, policy_loss)
        near(actor.log_probs(batch, adapters=False).log_probs, expected)
        assert not torch.allclose(actor.log_probs(batch).log_probs, expected, atol=5e-2)
        after = dict(actor.engine.module.named_parameters())
        adapters = {name for name in before if ".lora." in name}
        assert {name for name, tensor in after.items() if not torch.equal(tensor, before[name])} == adapters
        count = sum(before[name].numel() for name in adapters)
        padding = 256 * dims.dp  # Megatron pads a divided buffer
        gradients = sum(buffer.numel() for buffer in gradient_buffers(actor.engine._trained))
        assert count <= gradients < count + padding
        kinds = 2 if dtype == torch.float32 else 3
        held = sum(tensor.numel() for tensor in actor.optimizer.tensors() if tensor.numel() > 1)
        assert held <= kinds * -(-(count + padding) // dims.dp)
        found = actor.generate([[1, 2, 3], [4, 5]], max_new_tokens=5, seed=1)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        ours = actor.log_probs(found).log_probs
        torch.testing.assert_close(ours[found.mask], found["log_probs"][found.mask], atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        (ParallelDims(tp=2), torch.float32),
        pytest.param(ParallelDims(dp=2), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2), torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["tp2", "dp2 bf16", "pp2 bf16"],
)
def test_the_base_is_frozen_and_the_reference(
    ranks: RankPool, tiny: Callable[..., Path], dims: ParallelDims, dtype: torch.dtype
) -> None:
    ranks.run(base_on, tiny("llama"), dims, dtype, world=2)


def learned_on(group: ProcessGroup, path: Path, dims: ParallelDims, options: dict[str, Any]) -> tuple[list[str], float]:
    """The adapters of this rank that have learned, and the last gradient norm."""
    with cpu_stand_in():
        actor = load(Actor, path, dims, **options)
        metrics = [actor.update(batch_of(actor), policy_loss) for _ in range(2)]
    named = actor.engine.module.named_parameters()
    return [name for name, p in named if name.endswith("lora.B") and p.any()], metrics[-1]["grad_norm"]


@pytest.mark.slow
def test_a_stage_may_lack_adapters(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    for layer in range(2):
        lora = LoraOptions(rank=2, targets=rf"model\.layers\.{layer}\.self_attn\.[qv]_proj")
        stages = ranks.run(learned_on, tiny("llama"), ParallelDims(pp=2), {"lora": lora}, world=2)
        assert [len(names) for names, _ in stages] == [layer == 0, layer == 1]


@pytest.mark.slow
def test_every_option_gives_the_same_gradient(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", num_hidden_layers=4)
    ((names, expected),) = ranks.run(learned_on, path, ParallelDims(), {}, world=1)
    assert len(names) == 16
    for dims, options in (
        (ParallelDims(tp=2), {"recompute": "full"}),
        (ParallelDims(tp=2), {"tiled_mlp": 2, "offload_activations": True}),
        (ParallelDims(pp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
        (ParallelDims(dp=2), {"megatron": MegatronOptions(distributed_optimizer=False)}),
        (ParallelDims(cp=2), {"context_parallel": "ring"}),
    ):
        for _, norm in ranks.run(learned_on, path, dims, options, world=2):
            assert norm == pytest.approx(expected, rel=1e-4), (dims, options)
    tied = tiny("qwen2")  # whose embedding lies on both stages
    ((_, expected),) = ranks.run(learned_on, tied, ParallelDims(), {}, world=1)
    for dims in (ParallelDims(pp=2), ParallelDims(dp=2)):
        for _, norm in ranks.run(learned_on, tied, dims, {}, world=2):
            assert norm == pytest.approx(expected, rel=1e-4)
    # A rank may hold no row of an adapted part: with more ranks than KV heads Megatron-Core cuts between heads.
    lora = {"lora": LoraOptions(rank=2, targets=["q_proj", "down_proj"])}
    ((_, expected),) = ranks.run(learned_on, path, ParallelDims(), lora, world=1)
    for _, norm in ranks.run(learned_on, path, ParallelDims(tp=4), lora, world=4):
        assert norm == pytest.approx(expected, rel=1e-4)


def critic_on(group: ProcessGroup, path: Path, dims: ParallelDims, out: Path) -> Tensor:
    with cpu_stand_in():
        critic = load(Critic, path, dims)
        batch = batch_of(critic)
        before = critic.values(batch)
        for _ in range(2):
            critic.update(batch, value_loss)
        assert not torch.allclose(critic.values(batch), before)
        critic.save_adapter(out / "adapter")
        again = load(Critic, path, dims, lora=out / "adapter")
        assert torch.equal(again.values(batch), critic.values(batch))
        return critic.values(batch_of())


def test_a_value_head_is_trained_and_saved_with_the_adapters(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny("critic")
    results = ranks.run(critic_on, path, ParallelDims(tp=2), tmp_path, world=2)
    native = Critic.from_pretrained(path, lora=tmp_path / "adapter")
    for values in results:
        torch.testing.assert_close(values, native.values(batch_of()), rtol=0, atol=1e-5)


def refused_on(group: ProcessGroup, llama: Path, mixture: Path, tied: Path) -> None:
    with cpu_stand_in():
        for path, options, text in (
            (
                llama,
                {"lora": LoraOptions(targets=["lm_head"])},
                "offers adapters of the layers' linears, and not of lm",
            ),
            (mixture, {"lora": LoraOptions(targets=["experts.down_proj"])}, "not of model.layers.0.mlp.experts.down_"),
            (llama, {"lora": LoraOptions(targets=["wq"])}, "the target 'wq' of the adapters matches no layer"),
            (tied, {"lora": LoraOptions(targets=["embed_tokens"])}, "model.embed_tokens is tied to the head"),
            (
                llama,
                {"megatron": MegatronOptions("transformer_engine")},
                "does not offer lora with layers='transformer_",
            ),
            (llama, {"base_format": "fp8"}, "does not offer base_format='fp8'"),
        ):
            with pytest.raises(ValueError, match=text):
                load(Actor, path, ParallelDims(), **options)


def test_mistakes_are_refused(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    ranks.run(refused_on, tiny("llama"), tiny("mixture"), tiny("qwen2"), world=1)
