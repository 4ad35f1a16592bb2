"""The numbers of the memory plan, from the config alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from planner_models import EXPERTS, LATENT
from transformers import (
    DeepseekV3Config,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import ckpt
from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_models import CacheOptions
from rl_models import OptimizerOptions
from rl_train.cli.commands import app
from rl_train.planner.memory import Memory, MemoryOptions
from rl_train.planner.models import Planned, dims_text, plan_models
from rl_train.planner.plan import plan_memory


def test_models_on_the_same_devices_rest_while_one_works() -> None:
    options = MemoryOptions(dims=ParallelDims(), tokens=1)
    actor = Memory(weights=10, optimizer=60, gradients=20, activations=5)
    models = {"actor": [actor], "critic": [Memory(9, 50, 18, 0, 4)], "reference": [Memory(10, activations=1)]}
    assert Planned(options, models).peak == 70 + 59 + 10 + 25
    assert Planned(options, models, offload=True).peak == actor.total == 95


def test_only_the_model_that_generates_has_a_cache(model: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(), tokens=256, dtype=torch.bfloat16)
    # 4 layers of 4 heads of 16 keys and values in bf16, for 64 sequences of 32 blocks and for padding.
    block = 64 * 4 * 2 * 4 * 16 * 2
    planned = plan_models(
        Checkpoint(model), replace(options, cache=CacheOptions(64, 2048)), critic=True, reference=True
    )
    assert {name: stages[0].cache for name, stages in planned.models.items()} == {
        "actor": (64 * 32 + 1) * block, "critic": 0, "reference": 0,
    }  # fmt: skip
    without = plan_models(Checkpoint(model), options, critic=True, reference=True)
    resting = sum(stages[0].resting for stages in without.models.values())
    actor = planned.models["actor"][0]
    # A prompt's layer needs more than a step's fp32 logits of 64 sequences.
    assert actor.generation == planned.models["reference"][0].layer > 4 * 64 * 1000
    assert planned.peak == resting + actor.cache + actor.generation > without.peak


def test_a_rank_holds_the_logits_of_its_part_of_the_vocabulary(model: Path) -> None:
    whole, part = (
        plan_memory(
            model,
            MemoryOptions(dims=ParallelDims(tp=tp), tokens=256, cache=CacheOptions(10**6, 64)),
            role="causal_lm",
            trained=True,
        )[0].generation
        for tp in (1, 2)
    )
    assert whole - part == 2 * 10**6 * Checkpoint(model).config["vocab_size"]


def test_steps_in_fp8_of_linear_attention_hold_its_projections(models: Path) -> None:
    plain, rounded = (
        plan_memory(
            models / "one mixer a layer",
            MemoryOptions(dims=ParallelDims(), tokens=256, cache=CacheOptions(1, 64, float8=float8)),
            role="causal_lm",
            trained=True,
        )[0].generation
        for float8 in (False, True)
    )
    tensors = ckpt.layout_for(Checkpoint(models / "one mixer a layer")).canonical
    sizes = {name: math.prod(x.shape) for name, x in tensors.items() if ".layers." in name and len(x.shape) > 1}
    projections = sum(size for name, size in sizes.items() if "_proj" in name)
    assert any("in_proj" in name for name in sizes)
    assert projections <= rounded - plain <= sum(sizes.values())


def test_weights_are_those_of_the_layout(model: Path) -> None:
    whole = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(model).parameters())
    options = MemoryOptions(dims=ParallelDims(dp=2, tp=2, pp=2), tokens=64, dtype=torch.bfloat16)
    first, second = plan_memory(model, options, role="causal_lm", trained=True)
    norms = 2 * 2 * 128 + 64
    assert first.weights + second.weights == 2 * (whole - 9 * 128) // 4 + 2 * (8 * 128 + 128) // 2, norms
    assert (first.optimizer, first.gathered > 0) == (6 * first.weights, True)
    assert first.activations > second.activations, "the first stage of a pipeline has more micro-batches in flight"
    (reference,) = plan_memory(model, MemoryOptions(dims=ParallelDims(), tokens=64), role="causal_lm", trained=False)
    assert (reference.optimizer, reference.gradients) == (0, 0)


def test_replicas_add_ranks_and_save_no_memory(model: Path, models: Path) -> None:
    def plan_of(path: Path, **sizes: int) -> Memory:
        options = MemoryOptions(dims=ParallelDims(**sizes), tokens=64, dtype=torch.bfloat16)
        return plan_memory(path, options, role="causal_lm", trained=True)[0]

    assert plan_of(model, dp=4, replicate=2) == plan_of(model, dp=2) != plan_of(model, dp=4)
    # A replica of one rank shards nothing, and FSDP2 gathers all the same.
    assert plan_of(model, dp=2, replicate=2).gathered > 0 == plan_of(model).gathered
    one, two = plan_of(models / "mixture", dp=2, ep=2), plan_of(models / "mixture", dp=4, ep=2, replicate=2)
    # FSDP2 leaves experts alone that one rank holds; with a copy in the other replica it gathers them.
    assert (two.weights, two.optimizer) == (one.weights, one.optimizer)
    assert two.gathered > one.gathered
    assert dims_text(ParallelDims(dp=4, replicate=2)) == "dp=4,replicate=2"


def test_gathered_experts_count_while_responses_are_drawn(models: Path) -> None:
    """Both ways hold the rank's own half of the experts, and "gather" the other half, too."""

    def plan_of(dims: ParallelDims, experts: Literal["auto", "gather", "exchange"]) -> Memory:
        cache = CacheOptions(1, 64, experts=experts)
        options = MemoryOptions(dims=dims, tokens=64, dtype=torch.bfloat16, cache=cache)
        return plan_memory(models / "mixture", options, role="causal_lm", trained=True)[0]

    dims = ParallelDims(dp=2, ep=2)
    gathered, exchanged, auto = (plan_of(dims, experts) for experts in ("gather", "exchange", "auto"))
    assert auto == exchanged
    canonical = ckpt.layout_for(Checkpoint(models / "mixture")).canonical
    experts = sum(math.prod(tensor.shape) for name, tensor in canonical.items() if ".experts." in name)
    assert gathered.generation - exchanged.generation == 2 * experts // 2  # bf16; the half of the other rank


@pytest.mark.parametrize(("dims", "experts"), [("tp=1", "auto"), ("dp=2,ep=2", "gather")])
def test_copies_in_fp8_count_while_responses_are_drawn(models: Path, dims: str, experts: Any) -> None:
    """A byte for each element of a projection; gathered experts are in FP8 alone, and a prompt makes a weight dense."""
    plain, rounded = (
        plan_memory(
            models / "mixture",
            MemoryOptions(dims=ParallelDims.parse(dims), tokens=64, dtype=torch.bfloat16, cache=cache),
            role="causal_lm",
            trained=True,
        )[0]
        for cache in (CacheOptions(1, 64, experts=experts), CacheOptions(1, 64, experts=experts, float8=True))
    )
    canonical = ckpt.layout_for(Checkpoint(models / "mixture")).canonical
    sizes = {name: math.prod(x.shape) for name, x in canonical.items() if ".layers." in name and len(x.shape) > 1}
    routers = sum(size for name, size in sizes.items() if name.endswith("mlp.gate.weight"))
    assert rounded.cache == plain.cache
    further = rounded.generation - plain.generation
    if experts == "gather":
        of_experts = {name: size for name, size in sizes.items() if ".experts." in name}
        layer = [size for name, size in of_experts.items() if ".layers.1." in name and "down_proj" not in name]
        further += 2 * sum(of_experts.values()) // 2 - 2 * sum(layer)  # bf16: the other half; gate and up of a layer
    assert 0 <= further - (sum(sizes.values()) - routers) <= routers


def test_more_micro_batches_need_more_buffers_in_a_pipeline(model: Path) -> None:
    few, many = (
        plan_memory(
            model,
            MemoryOptions(dims=ParallelDims(pp=2), tokens=100, dtype=torch.float32, micro_batches=n),
            role="value",
            trained=True,
        )
        for n in (4, 6)
    )
    # Each stage of two has one neighbour.
    assert [b.activations - a.activations for a, b in zip(few, many, strict=True)] == [2 * 100 * 128 * 4] * 2


def test_prediction_layers_are_held_and_frozen() -> None:
    config = DeepseekV3Config(**LATENT, architectures=["DeepseekV3ForCausalLM"]).to_dict()
    options = MemoryOptions(dims=ParallelDims(dp=2, ep=2), tokens=64, dtype=torch.float32)
    (without,), (with_one,) = (
        plan_memory({**config, "num_nextn_predict_layers": count}, options, role="causal_lm", trained=True)
        for count in (0, 1)
    )
    assert with_one.weights > without.weights
    assert (with_one.optimizer, with_one.gradients) == (without.optimizer, without.gradients)
    # A critic leaves them out.
    (critic,) = plan_memory({**config, "num_nextn_predict_layers": 1}, options, role="value", trained=True)
    assert critic.weights < without.weights


def test_files_say_whether_there_are_prediction_layers(models: Path) -> None:
    """Configs of Qwen3-Next do not say so, and transformers saves no such layer."""
    checkpoint = Checkpoint(models / "hybrid")
    options = MemoryOptions(dims=ParallelDims(), tokens=64, dtype=torch.float32)
    (of_files,) = plan_memory(checkpoint, options, role="causal_lm", trained=False)
    (of_config,) = plan_memory(checkpoint.config, options, role="causal_lm", trained=False)
    assert of_files.weights == 4 * sum(math.prod(shape) for shape in checkpoint.shapes.values()) < of_config.weights


def test_a_teacher_has_a_model_a_head_and_states(model: Path, tmp_path: Path) -> None:
    """The head is the last stage's; the policy without its adapters is a teacher without a model of its own."""
    wide = json.loads((model / "config.json").read_text()) | {"hidden_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    grid = ParallelDims(tp=2, pp=2)
    options = MemoryOptions(dims=grid, tokens=64, micro_batches=3, dtype=torch.bfloat16, mask_width=3)
    plain, taught = (
        plan_models(Checkpoint(model), options, critic=False, reference=False, teacher=teacher)
        for teacher in (None, Checkpoint(tmp_path))
    )
    # Half of 1000 rows in bf16; the states of three micro-batches twice, and of one that is picked.
    head = [0, 500 * 192 * 2]
    for stage, (before, after) in enumerate(zip(plain.models["actor"], taught.models["actor"], strict=True)):
        assert after.weights - before.weights == head[stage]
        assert (before.states, after.states) == (0, 7 * 64 * 192 * 2)
    assert taught.models["actor"][1].logits > plain.models["actor"][1].logits
    assert set(taught.models) == {"actor", "teacher"}
    adapted = plan_models(
        Checkpoint(model), replace(options, lora=LoraOptions(8)), critic=False, reference=False,
        teacher=Checkpoint(model),
    )  # fmt: skip
    assert set(adapted.models) == {"actor"}
    assert adapted.models["actor"][1].states == 7 * 64 * 128 * 2


def test_a_judge_is_frozen_and_draws(model: Path) -> None:
    """Beside a policy with adapters, which it does not have."""
    cache = CacheOptions(sequences=8, max_length=64)
    options = MemoryOptions(dims=ParallelDims(tp=2), tokens=64, dtype=torch.bfloat16, cache=cache, lora=LoraOptions(8))
    planned = plan_models(Checkpoint(model), options, critic=False, reference=False, judge=Checkpoint(model))
    (judge,), (actor,) = planned.models["judge"], planned.models["actor"]
    (frozen,) = plan_memory(model, replace(options, lora=None, cache=None), role="causal_lm", trained=False)
    assert (judge.weights, judge.optimizer, judge.cache) == (frozen.weights, 0, actor.cache)
    assert judge.weights < actor.weights
    assert judge.cache > 0


def test_adapters_have_gradients_and_moments_of_their_own_alone(model: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(tp=2), tokens=64, dtype=torch.bfloat16)
    (full,) = plan_memory(model, options, role="causal_lm", trained=True)
    (adapted,) = plan_memory(model, replace(options, lora=LoraOptions(8)), role="causal_lm", trained=True)
    # 4 layers of A and B: q, k, v and gate, up with rows of B divided, o and down with columns of A divided.
    own = 4 * 8 * (3 * 128 + (128 + 64 + 64) // 2 + 64 + 128 + 2 * 128 + 2 * 352 // 2 + 352 // 2 + 128)
    assert adapted.weights - full.weights == 2 * own
    assert adapted.optimizer == 12 * own
    assert adapted.gradients < full.gradients / 5
    # The critic shares the base, and the reference is the actor without adapters.
    planned = plan_models(Checkpoint(model), replace(options, lora=LoraOptions(8)), critic=True, reference=True)
    assert set(planned.models) == {"actor", "critic"}
    assert planned.models["critic"][0].weights == 2 * own
    # In FP8 a frozen weight has a byte, and four for each block; the critic adds no base in this form either.
    eight = replace(options, lora=LoraOptions(8), base_format="fp8")
    planned = plan_models(Checkpoint(model), eight, critic=True, reference=True)
    matrices = 4 * 128 * (128 + 64 + 64 + 128 + 3 * 352) // 2
    saved = adapted.weights - planned.models["actor"][0].weights
    assert matrices * 0.99 < saved < matrices
    assert planned.models["critic"][0].weights == 2 * own
    with pytest.raises(ValueError, match="base_format='fp8' is for the frozen base of adapters: it needs lora"):
        replace(options, base_format="fp8")


def test_adapters_of_experts_are_counted(models: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(ep=2, dp=2), tokens=64, dtype=torch.bfloat16)

    def plan_of(**lora: Any) -> Memory:
        changed = replace(options, lora=LoraOptions(8, **lora))
        return plan_memory(models / "mixture", changed, role="causal_lm", trained=True)[0]

    alone, each, shared = plan_of(), plan_of(targets=EXPERTS), plan_of(targets=EXPERTS, shared_experts=True)
    assert alone.weights < shared.weights < each.weights
    assert alone.optimizer < shared.optimizer < each.optimizer
    # Each expert's own factors are copied in the layout of the grouped GEMM.
    assert alone.activations < shared.activations < each.activations


@pytest.mark.parametrize(
    ("options", "bytes_per_weight"),
    [({"moments": "bfloat16"}, 8), ({"moments": "int8"}, 6 + 2 * 4 / 256), ({"algorithm": "muon"}, None)],
)
def test_the_optimizer_decides_the_bytes_of_its_state(
    model: Path, options: Any, bytes_per_weight: float | None
) -> None:
    given = MemoryOptions(dims=ParallelDims(), tokens=64, dtype=torch.bfloat16, optimizer=OptimizerOptions(**options))
    (planned,) = plan_memory(model, given, role="causal_lm", trained=True)
    numel = planned.weights // 2
    if bytes_per_weight is None:
        matrices = 4 * 128 * (128 + 64 + 64 + 128 + 3 * 352)
        assert planned.optimizer == 12 * (numel - matrices) + 8 * matrices
    else:
        assert planned.optimizer == pytest.approx(bytes_per_weight * numel, rel=1e-4)


@pytest.mark.parametrize(("dtype", "of_a_weight"), [(torch.bfloat16, 12), (torch.float32, 8)])
def test_an_offloaded_optimizer_counts_on_the_host(model: Path, dtype: torch.dtype, of_a_weight: int) -> None:
    here = MemoryOptions(dims=ParallelDims(dp=2), tokens=64, dtype=dtype)
    away = replace(here, optimizer=OptimizerOptions(offload=True))
    (resident,), (offloaded,) = (plan_memory(model, given, role="causal_lm", trained=True) for given in (here, away))
    assert (
        resident.optimizer == offloaded.host == pytest.approx(of_a_weight / dtype.itemsize * resident.weights, rel=1e-4)
    )
    assert offloaded.optimizer == resident.host == 0
    assert offloaded.total < resident.total
    text = CliRunner().invoke(app, ["plan", "--model", str(model), "--optimizer.offload"]).stdout
    assert "GiB of optimizer state in host memory" in text


def test_routers_in_fp32_beside_bf16_are_their_own_masters(models: Path) -> None:
    folder = models / "other names of experts"
    planned = [
        plan_memory(folder, MemoryOptions(dims=ParallelDims(), tokens=64, dtype=dtype), role="causal_lm", trained=True)[
            0
        ]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    layout = ckpt.layout_for(folder)
    routers = sum(math.prod(entry.shape) for entry in layout.canonical.values() if entry.keep_dtype)
    total = planned[1].weights // 4
    assert routers
    assert planned[0].weights == 2 * total + 2 * routers
    assert planned[0].optimizer == 12 * (total - routers) + 8 * routers


def test_one_micro_batch_alone_has_no_gradients_beside_its_activations(model: Path) -> None:
    options = MemoryOptions(dims=ParallelDims(), tokens=4096, dtype=torch.bfloat16)
    one, two = (
        plan_memory(model, replace(options, micro_batches=count), role="causal_lm", trained=True)[0] for count in (1, 2)
    )
    assert one.activations == two.activations
    assert one.gradients < two.gradients / 2
    (shared,) = plan_memory(model, replace(options, repeated=0.375), role="causal_lm", trained=True)
    # Attention keeps the repeated tokens' keys and values.
    assert 0.63 < shared.activations / two.activations < 0.66
    (eight,) = plan_memory(model, replace(options, float8="current"), role="causal_lm", trained=True)
    assert eight.activations < two.activations


def test_fp8_copies_of_weights(model: Path) -> None:
    """Kept for the whole update, for a layer that is computed again, or for one matrix under FSDP2."""

    def copies(dims: ParallelDims, **options: Any) -> int:
        plain = MemoryOptions(dims=dims, tokens=4096, dtype=torch.bfloat16, **options)
        none, eight = (_without_tokens(model, each) for each in (plain, replace(plain, float8="current")))
        return eight - none

    shapes = {name: entry.shape for name, entry in ckpt.layout_for(model).canonical.items() if "_proj" in name}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert copies(ParallelDims()) == 2 * sum(sizes.values())
    of_a_layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    assert copies(ParallelDims(), recompute="full") == 2 * of_a_layer
    gate_up = 2 * next(size for name, size in sizes.items() if "up_proj" in name)
    assert 0 <= copies(ParallelDims(dp=2), recompute="full") <= 2 * gate_up


def _without_tokens(model: Path, options: MemoryOptions) -> int:
    """Return the bytes of a plan that do not depend on the number of tokens."""
    fewer, more = (
        plan_memory(model, replace(options, tokens=tokens), role="causal_lm", trained=True)[0].total
        for tokens in (options.tokens, 2 * options.tokens)
    )
    return 2 * fewer - more
