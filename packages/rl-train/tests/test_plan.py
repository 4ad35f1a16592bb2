"""The memory plan against the live bytes of the real engine, which a dispatch mode counts."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from typer.testing import CliRunner

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.lora import LoraOptions
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, Critic, OptimizerOptions, PipelineOptions, losses
from rl_models.engines.decoding import CacheOptions
from rl_train.cli import app
from rl_train.loop.turns import Turns
from rl_train.planner.fitting import fitting
from rl_train.planner.memory import Memory, MemoryOptions
from rl_train.planner.models import Planned, dims_text, plan_models
from rl_train.planner.plan import plan_memory

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


MIXTURE = SIZES | {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
LATENT = SIZES | {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


HANDING_OVER = SIZES | {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 1000,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
ERNIE = SIZES | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96}


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, inside; less those of `ignored`."""

    def __init__(self, ignored: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self.alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.ignored = {tensor.untyped_storage()._cdata for tensor in ignored}

    def hold(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage._cdata not in self.ignored:
                self.alive[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(*(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)))
        # FSDP2 gives memory up by resizing storages, so each is asked again.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self.alive.values())))
        return out


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path / "llama")
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 16})).save_pretrained(path / "deep")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE)).save_pretrained(path / "mixture")
    Olmo2ForCausalLM(Olmo2Config(**SIZES)).save_pretrained(path / "norms over all heads")
    DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)).save_pretrained(path / "latent")
    Gemma4ForCausalLM(Gemma4TextConfig(**HANDING_OVER)).save_pretrained(path / "handing over")
    Cohere2ForCausalLM(Cohere2Config(**SIZES)).save_pretrained(path / "parallel blocks")
    Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**ERNIE)).save_pretrained(path / "other names of experts")
    return path


@pytest.fixture(scope="session")
def model(models: Path) -> Path:
    return models / "llama"


def maximise(*arguments: Any) -> losses.LossTerms:
    """Log-probabilities, values, or both: every other of a worker's outputs."""
    return losses.LossTerms(-sum(arguments[:-1:2]))


def random_batch(tokens: int) -> Batch:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return Batch.from_sequences([torch.randint(1000, (128,), generator=generator) for _ in range(tokens // 128)])


def measure(group: ProcessGroup, path: Path, kind: Any, options: MemoryOptions) -> int:
    """The peak of an update of two micro-batches for each stage, the second with all gradients there already."""
    dims = options.dims
    worker = kind.from_pretrained(
        path,
        dims=dims,
        mesh=dims.build_mesh("cpu", list(range(group.size()))) if group.size() > 1 else None,
        device="cpu",
        dtype=options.dtype,
        recompute=options.recompute,
        tiled_mlp=options.tiled_mlp,
        keep_probabilities=options.keep_probabilities,
        lora=options.lora,
        base_format=options.base_format,
        optimizer=options.optimizer,
        pipeline=options.pipeline,
        max_tokens_per_micro_batch=options.tokens,
    )
    batch = random_batch(2 * dims.pp * options.tokens)
    if options.mask_width:
        others = (batch.tokens[:, None] + torch.arange(options.mask_width)) % SIZES["vocab_size"]
        batch = batch.with_fields(sampling_mask=others.int())
    worker.update(batch, maximise)
    with LiveBytes() as live:
        live.hold(*worker.engine.module.parameters(), *worker.optimizer.tensors())
        worker.update(batch, maximise)
    return live.peak


class Case(NamedTuple):
    name: str
    tokens: int
    dims: ParallelDims = ParallelDims()
    options: Mapping[str, Any] = MappingProxyType({})
    kind: type[Actor] | type[Critic] | type[ActorCritic] = Actor

    def __str__(self) -> str:
        axes = dims_text(self.dims).replace(",", " ")
        return " ".join([self.kind.__name__, self.name, axes, *map(str, self.options.values())])


TWO_CHUNKS = {"pipeline": PipelineOptions(virtual_stages=2)}
BF16 = {"dtype": torch.bfloat16}
MASKED = {"mask_width": 200}
ADAPTED = {"lora": LoraOptions(16)}
EXPERTS = ("all-linear", "experts.gate_up_proj", "experts.down_proj")
ADAPTED_EXPERTS = {"lora": LoraOptions(16, targets=EXPERTS, shared_experts=True)}
MUON, IN_8_BITS = OptimizerOptions(algorithm="muon"), OptimizerOptions(moments="int8")
CASES = [
    Case("latent", 1024, options={"recompute": "selective"}),
    Case("llama", 1024, options=MASKED),
    Case("llama", 512, options=BF16 | ADAPTED),
]
MORE_CASES = [
    Case("llama", 1024, ParallelDims(tp=2), ADAPTED),
    Case("llama", 1024, ParallelDims(dp=2), ADAPTED | {"recompute": "full"}),
    Case("llama", 512, ParallelDims(pp=2), ADAPTED),
    Case("mixture", 1024, ParallelDims(dp=2, ep=2), ADAPTED),
    Case("mixture", 1024, ParallelDims(dp=2, ep=2), ADAPTED_EXPERTS),
    Case("mixture", 1024, ParallelDims(tp=2), ADAPTED_EXPERTS),
    Case("llama", 256, ParallelDims(dp=2), BF16 | ADAPTED | {"base_format": "fp8"}),
    Case("mixture", 256, options=BF16 | ADAPTED | {"base_format": "fp8"}),
    Case("llama", 256, options=BF16 | {"optimizer": MUON}),
    Case("llama", 256, ParallelDims(dp=2), {"optimizer": MUON}),
    Case("mixture", 256, ParallelDims(tp=2), {"optimizer": MUON}),
    Case("llama", 256, options=BF16 | {"optimizer": IN_8_BITS}),
    Case("llama", 256, options={"optimizer": OptimizerOptions(moments="bfloat16")}),
    Case("llama", 1024, ParallelDims(tp=2), kind=ActorCritic),
    Case("llama", 1024, ParallelDims(tp=2), MASKED | BF16),
    Case("llama", 1024, ParallelDims(pp=2), MASKED),
    Case("llama", 1024, options={"mask_width": 20, **BF16}),
    Case("mixture", 1024, ParallelDims(dp=2, ep=2)),
    Case("llama", 1024, ParallelDims(pp=2)),
    Case("norms over all heads", 1024, options={"recompute": "full"}),
    Case("deep", 256, ParallelDims(dp=2)),
    Case("llama", 2048, options=BF16, kind=Critic),
    Case("llama", 1024, ParallelDims(cp=2)),
    Case("llama", 1024),
    Case("llama", 1024, options={"recompute": "full"}),
    Case("llama", 1024, options={"recompute": "selective"}),
    Case("llama", 1024, ParallelDims(tp=2)),
    Case("latent", 1024),
    Case("norms over all heads", 1024),
    Case("llama", 1024, options={"recompute": (0, 2)}),
    Case("llama", 1024, options={"tiled_mlp": 4}),
    Case("llama", 1024, options={"tiled_mlp": 4, "recompute": "full"}),
    Case("llama", 1024, options={"recompute": "selective", **BF16}),
    Case("llama", 1024, ParallelDims(tp=2), {"recompute": "selective"}),
    Case("deep", 256, ParallelDims(dp=2), BF16),
    Case("llama", 1024, ParallelDims(cp=2), {"recompute": "full"}),
    Case("llama", 1024, ParallelDims(pp=2), {"recompute": "full"}),
    Case("llama", 512, ParallelDims(pp=2), TWO_CHUNKS),
    Case("llama", 1024, ParallelDims(pp=2), TWO_CHUNKS | BF16, Critic),
    Case("llama", 512, ParallelDims(dp=2, pp=2)),
    Case("llama", 1024, kind=ActorCritic),
    Case("llama", 2048, options=BF16, kind=ActorCritic),
    Case("llama", 1024, ParallelDims(pp=2), BF16, ActorCritic),
    Case("mixture", 1024),
    Case("mixture", 1024, options=BF16),
    Case("mixture", 1024, options={"recompute": "selective"}),
    Case("mixture", 1024, options={"recompute": "full"}),
    Case("mixture", 1024, ParallelDims(tp=2)),
    Case("mixture", 1024, ParallelDims(tp=2, ep=2)),
    Case("mixture", 1024, ParallelDims(pp=2)),
    Case("latent", 1024, ParallelDims(tp=2)),
    Case("norms over all heads", 1024, ParallelDims(tp=2), BF16),
    Case("parallel blocks", 1024),
    Case("parallel blocks", 1024, ParallelDims(tp=2), BF16),
    Case("parallel blocks", 1024, options={"recompute": "selective"}),
    Case("other names of experts", 1024),
    Case("other names of experts", 1024, ParallelDims(pp=2)),
    Case("handing over", 1024),
    Case("handing over", 1024, options={"recompute": "full"}),
    Case("handing over", 1024, ParallelDims(tp=2), BF16),
    Case("handing over", 1024, ParallelDims(pp=2)),
    Case("handing over", 1024, ParallelDims(pp=2), BF16),
    Case("handing over", 1024, ParallelDims(pp=2), {"recompute": "full"}),
    Case("handing over", 512, ParallelDims(pp=2), TWO_CHUNKS),
    Case("handing over", 1024, ParallelDims(pp=2, tp=2)),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(ranks: RankPool, models: Path, case: Case) -> None:
    options = MemoryOptions(case.dims, case.tokens, **{"dtype": torch.float32, **case.options}, device="cpu")
    measured = ranks.run(measure, models / case.name, case.kind, options, world=case.dims.world_size, timeout=120)
    planned = plan_memory(models / case.name, options, role=case.kind.role, trained=True)
    ranks_of_stage = case.dims.world_size // case.dims.pp
    for stage, memory in enumerate(planned):
        peak = max(measured[stage * ranks_of_stage : (stage + 1) * ranks_of_stage])
        assert memory.total == pytest.approx(peak, rel=0.1), (stage, memory)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_the_plan_of_models_that_share_devices_is_within_a_tenth(model: Path, offload: bool) -> None:
    turns = Turns()
    workers = [
        kind.from_pretrained(model, device="cpu", max_tokens_per_micro_batch=512) for kind in (Actor, Critic, Actor)
    ]
    actor, critic, reference = (turns.add(worker) if offload else worker for worker in workers)
    batch = random_batch(1024)

    def step() -> None:
        reference.log_probs(batch)
        actor.log_probs(batch)
        critic.values(batch)
        critic.update(batch, maximise)
        actor.update(batch, maximise)

    for _ in range(1 + offload):
        step()  # the host's buffers are there from the second on
    offloads = [offload for worker in workers for offload in (worker._weights_away, worker._optimizer_away)]
    with LiveBytes(ignored=[offload._buffer.data for offload in offloads]) as live:
        for worker in workers:
            live.hold(*worker.engine.module.parameters())
            if "optimizer" in vars(worker):
                live.hold(*worker.optimizer.tensors())
        step()
    options = MemoryOptions(ParallelDims(), 512, torch.float32, device="cpu")
    planned = plan_models(model, options, critic=True, reference=True, offload=offload)
    assert planned.peak == pytest.approx(live.peak, rel=0.1), planned.to_json()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("keep", [False, True])
def test_the_plan_is_within_a_tenth_of_the_peak_of_a_gpu(tmp_path: Path, keep: bool) -> None:
    gc.collect()
    # Large enough that what libraries keep for themselves does not count.
    sizes = SIZES | {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    worker = Actor.from_pretrained(tmp_path, device="cuda", max_tokens_per_micro_batch=8192, keep_probabilities=keep)
    batch = random_batch(16384)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        worker.update(batch, maximise)
    options = MemoryOptions(ParallelDims(), 8192, keep_probabilities=keep)
    (planned,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    assert torch.cuda.max_memory_allocated() == pytest.approx(planned.total, rel=0.1), planned


def test_models_on_the_same_devices_rest_while_one_works() -> None:
    options = MemoryOptions(ParallelDims(), 1)
    actor = Memory(weights=10, optimizer=60, gradients=20, activations=5)
    models = {"actor": [actor], "critic": [Memory(9, 50, 18, 0, 4)], "reference": [Memory(10, activations=1)]}
    assert Planned(options, models).peak == 70 + 59 + 10 + 25
    assert Planned(options, models, offload=True).peak == actor.total == 95


def allocated(group: ProcessGroup, path: Path, dims: ParallelDims, cache: CacheOptions) -> int:
    """The bytes of the pools of the engine's own cache."""
    mesh = dims.build_mesh("cpu", list(range(group.size()))) if group.size() > 1 else None
    worker = Actor.from_pretrained(path, device="cpu", dims=dims, mesh=mesh, dtype=torch.bfloat16)
    with worker.engine.decoding(cache) as decoding:
        pools = [pool for own in decoding.caches for pool in (*own.keys, *own.values) if pool is not None]
        return sum(pool.untyped_storage().nbytes() for pool in pools)


@pytest.mark.parametrize("name", ["llama", "latent", pytest.param("handing over", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dims",
    [ParallelDims(), ParallelDims(tp=2), pytest.param(ParallelDims(dp=2, pp=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_the_planned_cache_is_what_the_engine_allocates(
    ranks: RankPool, models: Path, name: str, dims: ParallelDims
) -> None:
    path = models / name
    for gib in (None, 0.002):
        cache = CacheOptions(24, 200, gib)
        options = MemoryOptions(dims, 512, torch.bfloat16, device="cpu", cache=cache)
        planned = plan_memory(path, options, role="causal_lm", trained=True)
        measured = ranks.run(allocated, path, dims, cache, world=dims.world_size, timeout=120)
        of_stage = dims.world_size // dims.pp
        assert [memory.cache for memory in planned for _ in range(of_stage)] == measured
        assert gib is None or max(measured) <= gib * 2**30
    with pytest.raises(ValueError, match=r"a sequence of 200 tokens takes 4 blocks .* give more memory by cache_gib"):
        plan_memory(path, replace(options, cache=CacheOptions(24, 200, 2e-5)), role="causal_lm", trained=True)


def test_only_the_model_that_generates_has_a_cache(model: Path) -> None:
    options = MemoryOptions(ParallelDims(), 256, torch.bfloat16)
    # 4 layers of 4 heads of 16 keys and values in bf16, for 64 sequences of 32 blocks and for padding.
    block = 64 * 4 * 2 * 4 * 16 * 2
    planned = plan_models(model, replace(options, cache=CacheOptions(64, 2048)), critic=True, reference=True)
    assert {name: stages[0].cache for name, stages in planned.models.items()} == {
        "actor": (64 * 32 + 1) * block, "critic": 0, "reference": 0,
    }  # fmt: skip
    without = plan_models(model, options, critic=True, reference=True)
    resting = sum(stages[0].resting for stages in without.models.values())
    actor = planned.models["actor"][0]
    assert actor.generation == max(actor.layer, 4 * 64 * 1000)
    assert planned.peak == resting + actor.cache + actor.generation > without.peak


def test_weights_are_those_of_the_layout(model: Path) -> None:
    whole = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(model).parameters())
    options = MemoryOptions(ParallelDims(dp=2, tp=2, pp=2), 64, torch.bfloat16)
    first, second = plan_memory(model, options, role="causal_lm", trained=True)
    norms = 2 * 2 * 128 + 64
    assert first.weights + second.weights == 2 * (whole - 9 * 128) // 4 + 2 * (8 * 128 + 128) // 2, norms
    assert (first.optimizer, first.gathered > 0) == (6 * first.weights, True)
    assert first.activations > second.activations, "the first stage of a pipeline has more micro-batches in flight"
    (reference,) = plan_memory(model, MemoryOptions(ParallelDims(), 64), role="causal_lm", trained=False)
    assert (reference.optimizer, reference.gradients) == (0, 0)


def test_the_command_says_what_fits(model: Path) -> None:
    alone = ["plan", "--model", str(model), "--dims", "tp=2", "--tokens", "4096", "--reference"]
    command = [*alone, "--critic"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["models"]) == {"actor", "critic", "reference"}
    largest = max(memory["total"] for stages in found["models"].values() for memory in stages)
    assert largest < found["peak"]
    smaller = json.loads(CliRunner().invoke(app, [*command, "--json", "--offload"]).stdout)
    assert smaller["peak"] == largest
    shared = json.loads(CliRunner().invoke(app, [*alone, "--json", "--share-backbone"]).stdout)
    assert set(shared["models"]) == {"actor_critic", "reference"}
    backbones = [models["models"]["actor_critic" if models is shared else "actor"][0] for models in (shared, found)]
    assert backbones[0]["weights"] - backbones[1]["weights"] == 4 * (128 + 1), "a value head"
    assert shared["peak"] < found["peak"]
    less = json.loads(CliRunner().invoke(app, [*command, "--json", "--recompute=selective"]).stdout)
    assert less["peak"] < found["peak"]
    drawing = CliRunner().invoke(app, [*command, "--longest", "4096", "--max-sequences", "64", "--cache-gib", "0.05"])
    # 4 layers of 2 heads of 16 keys and values in fp32.
    block = 64 * 4 * 2 * 2 * 16 * 4
    cache = int(0.05 * 2**30) // block * block / 2**30
    assert f"actor, stage 0, while it generates: {cache:.2f} GiB of keys and values" in drawing.stdout
    limit = found["peak"] / 2**30 * 0.7
    result = CliRunner().invoke(app, [*command, "--gpu-gib", str(limit)])
    assert "does not fit" in result.stdout
    assert "fits" in result.stdout
    for arguments, message in (
        (["--dims", "tp=3"], "is not divisible by"),
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--micro-batches", "0"], "micro_batches=0 must be at least 1"),
        (["--recompute", "half"], "recompute='half' must be full, selective, or numbers"),
        (
            ["--share-backbone"],
            "critic (a separate model) and share_backbone (a head on the actor's layers) exclude each other",
        ),
        (["--cache-gib", "1"], "--cache-gib 1.0 must be a number of GiB, and needs --longest"),
        (["--longest", "4096", "--cache-gib", "0.0001"], "a sequence of 4096 tokens takes 64 blocks"),
        (["--gpu-gib", "inf"], "--gpu-gib inf must be a number of GiB, such as 80"),
        (["--gpu-gib", "1e308"], "--gpu-gib 1e+308 must be a number of GiB"),
        (["--virtual-stages", "0"], "virtual_stages=0 must be at least 1"),
        (["--virtual-stages", "2"], "needs pp > 1"),
        (["--model", str(model / "none")], "config.json"),
        (["--lora-targets", "q_proj"], "--lora-targets and --lora-shared-experts need --lora-rank"),
        (["--lora-rank", "8", "--lora-targets", "q_proj,wq"], "the target 'wq' of the adapters matches no layer"),
        (["--lora-rank", "8", "--base-format", "fp4"], "base_format='fp4' is unknown; use 'fp8', or None"),
        (["--lora-rank", "8", "--base-format", "fp8", "--float8", "block"], "excludes float8='block'"),
        (["--lora-rank", "8", "--optimizer", "muon"], "leave out lora or algorithm='muon'"),
    ):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 2, result.output
        assert message in result.stderr


@pytest.mark.parametrize("shared", [False, True])
def test_a_terminal_of_80_columns_shows_every_word_and_number_whole(model: Path, shared: bool) -> None:
    # Models of some hundred GiB on a rank.
    command = ["plan", "--model", str(model), "--tokens", "40000000", "--dims", "pp=2,tp=2", "--reference"]
    flags = ["--share-backbone" if shared else "--critic", "--gpu-gib", "900", "--mask-width", "2"]
    result = CliRunner().invoke(app, [*command, *flags], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    planned = json.loads(CliRunner().invoke(app, [*command, *flags, "--json"]).stdout)
    rows = [line.split() for line in result.stdout.splitlines()]
    # Four micro-batches of 4e7 tokens, three copies, 4 bytes for each of two tokens.
    assert "stage 1: 3.58 GiB of sampling masks" in result.stdout
    for name, stages in planned["models"].items():
        for number, memory in enumerate(stages):
            columns = [
                size for column, size in memory.items() if column not in ("masks", "cache", "generation", "host")
            ]
            assert [name, str(number), *(f"{size / 2**30:.2f}" for size in columns)] in rows
    assert max(memory["total"] for stages in planned["models"].values() for memory in stages) > 100 * 2**30
    assert ["opti-", "gradi-", "gath-", "activa-"] in rows
    assert ["model", "stage", "weights", "mizer", "ents", "ered", "tions", "layer", "logits", "total"] in rows


def test_grids_that_fit_have_the_fewest_ranks(model: Path) -> None:
    options = MemoryOptions(ParallelDims(), 4096)
    alone = plan_memory(model, options, role="causal_lm", trained=True)[0].total
    (only,) = fitting(model, options, alone, critic=False, reference=False)
    assert only.options == options
    # What is given stays, and nothing is added to it.
    given = replace(options, recompute=(0,))
    grids = [found.options for found in fitting(model, given, int(0.75 * alone), critic=False, reference=False)]
    assert grids
    assert {(entry.dims.world_size, entry.recompute) for entry in grids} == {(2, (0,))}
    several = fitting(model, options, alone, ranks=4, critic=False, reference=False)
    assert {found.options.dims.world_size for found in several} == {4}


def test_the_savings_that_cost_least_time_are_chosen(ranks: RankPool, model: Path) -> None:
    options = MemoryOptions(ParallelDims(), 1024, torch.float32, device="cpu")

    def peak(**savings: Any) -> int:
        return plan_memory(model, replace(options, **savings), role="causal_lm", trained=True)[0].total

    def chosen(limit: int) -> MemoryOptions:
        (found,) = fitting(model, options, limit, critic=False, reference=False)
        assert found.peak <= limit
        return found.options

    assert chosen(peak()).recompute is None
    # The fewest layers that suffice, of which one is cheaper than all MLPs, and three are not.
    assert chosen(peak() - 1).recompute == (0,)
    assert chosen(peak(recompute=(0,)) - 1).recompute == (0, 1)
    assert chosen(peak(recompute="selective")).recompute in ("selective", (0, 1))
    assert chosen(peak(recompute="full")).recompute == "full"
    least = chosen(peak(recompute="full", offload_activations=True))
    assert (least.recompute, least.offload_activations, least.tiled_mlp) == ("full", True, None)
    least = chosen(peak(recompute="full", offload_activations=True, tiled_mlp=8))
    assert (least.recompute, least.offload_activations, least.tiled_mlp) == ("full", True, 8)
    assert fitting(model, options, 1000, ranks=1, critic=False, reference=False) == []
    # The chosen options fit when they run.
    limit = peak(recompute=(0,))
    (measured,) = ranks.run(measure, model, Actor, chosen(limit), world=1, timeout=120)
    assert measured == pytest.approx(limit, rel=0.1)


def test_the_experts_of_a_mixture_are_shared_out_to_fit(models: Path) -> None:
    options = MemoryOptions(ParallelDims(), 256)
    whole = plan_memory(models / "mixture", options, role="causal_lm", trained=True)[0]
    given = replace(options, recompute="full")
    found = list(fitting(models / "mixture", given, int(0.7 * whole.total), critic=False, reference=False))
    assert {entry.options.dims.world_size for entry in found} == {2}
    assert {entry.options.dims.ep for entry in found} == {1, 2}
    with pytest.raises(ValueError, match="ep=2 is for a mixture of experts, which llama is not"):
        plan_memory(models / "llama", MemoryOptions(ParallelDims(dp=2, ep=2), 256), role="causal_lm", trained=True)


def test_more_micro_batches_need_more_buffers_in_a_pipeline(model: Path) -> None:
    few, many = (
        plan_memory(
            model, MemoryOptions(ParallelDims(pp=2), 100, torch.float32, micro_batches=n), role="value", trained=True
        )
        for n in (4, 6)
    )
    # Each stage of two has one neighbour.
    assert [b.activations - a.activations for a, b in zip(few, many, strict=True)] == [2 * 100 * 128 * 4] * 2


def test_prediction_layers_are_held_and_frozen() -> None:
    config = DeepseekV3Config(**LATENT, architectures=["DeepseekV3ForCausalLM"]).to_dict()
    options = MemoryOptions(ParallelDims(dp=2, ep=2), tokens=64, dtype=torch.float32)
    (without,), (with_one,) = (
        plan_memory({**config, "num_nextn_predict_layers": count}, options, role="causal_lm", trained=True)
        for count in (0, 1)
    )
    assert with_one.weights > without.weights
    assert (with_one.optimizer, with_one.gradients) == (without.optimizer, without.gradients)
    # A critic leaves them out.
    (critic,) = plan_memory({**config, "num_nextn_predict_layers": 1}, options, role="value", trained=True)
    assert critic.weights < without.weights


def test_adapters_have_gradients_and_moments_of_their_own_alone(model: Path) -> None:
    options = MemoryOptions(ParallelDims(tp=2), 64, torch.bfloat16)
    (full,) = plan_memory(model, options, role="causal_lm", trained=True)
    (adapted,) = plan_memory(model, replace(options, lora=LoraOptions(8)), role="causal_lm", trained=True)
    # 4 layers of A and B: q, k, v and gate, up with rows of B divided, o and down with columns of A divided.
    own = 4 * 8 * (3 * 128 + (128 + 64 + 64) // 2 + 64 + 128 + 2 * 128 + 2 * 352 // 2 + 352 // 2 + 128)
    assert adapted.weights - full.weights == 2 * own
    assert adapted.optimizer == 12 * own
    assert adapted.gradients < full.gradients / 5
    # The critic shares the base, and the reference is the actor without adapters.
    planned = plan_models(model, replace(options, lora=LoraOptions(8)), critic=True, reference=True)
    assert set(planned.models) == {"actor", "critic"}
    assert planned.models["critic"][0].weights == 2 * own
    # In FP8 a frozen weight has a byte, and four for each block; the critic adds no base in this form either.
    eight = replace(options, lora=LoraOptions(8), base_format="fp8")
    planned = plan_models(model, eight, critic=True, reference=True)
    matrices = 4 * 128 * (128 + 64 + 64 + 128 + 3 * 352) // 2
    saved = adapted.weights - planned.models["actor"][0].weights
    assert matrices * 0.99 < saved < matrices
    assert planned.models["critic"][0].weights == 2 * own
    with pytest.raises(ValueError, match="base_format='fp8' is for the frozen base of adapters: it needs lora"):
        replace(options, base_format="fp8")


def test_adapters_of_experts_are_counted(models: Path) -> None:
    options = MemoryOptions(ParallelDims(ep=2, dp=2), 64, torch.bfloat16)

    def plan_of(**lora: Any) -> Memory:
        changed = replace(options, lora=LoraOptions(8, **lora))
        return plan_memory(models / "mixture", changed, role="causal_lm", trained=True)[0]

    alone, each, shared = plan_of(), plan_of(targets=EXPERTS), plan_of(targets=EXPERTS, shared_experts=True)
    assert alone.weights < shared.weights < each.weights
    assert alone.optimizer < shared.optimizer < each.optimizer
    assert alone.activations < shared.activations == each.activations


@pytest.mark.parametrize(
    ("options", "bytes_per_weight"),
    [({"moments": "bfloat16"}, 8), ({"moments": "int8"}, 6 + 2 * 4 / 256), ({"algorithm": "muon"}, None)],
)
def test_the_optimizer_decides_the_bytes_of_its_state(
    model: Path, options: Any, bytes_per_weight: float | None
) -> None:
    given = MemoryOptions(ParallelDims(), 64, torch.bfloat16, optimizer=OptimizerOptions(**options))
    (planned,) = plan_memory(model, given, role="causal_lm", trained=True)
    numel = planned.weights // 2
    if bytes_per_weight is None:
        matrices = 4 * 128 * (128 + 64 + 64 + 128 + 3 * 352)
        assert planned.optimizer == 12 * (numel - matrices) + 8 * matrices
    else:
        assert planned.optimizer == pytest.approx(bytes_per_weight * numel, rel=1e-4)


@pytest.mark.parametrize(("dtype", "of_a_weight"), [(torch.bfloat16, 12), (torch.float32, 8)])
def test_an_offloaded_optimizer_counts_on_the_host(model: Path, dtype: torch.dtype, of_a_weight: int) -> None:
    here = MemoryOptions(ParallelDims(dp=2), 64, dtype)
    away = replace(here, optimizer=OptimizerOptions(offload=True))
    (resident,), (offloaded,) = (plan_memory(model, given, role="causal_lm", trained=True) for given in (here, away))
    assert (
        resident.optimizer == offloaded.host == pytest.approx(of_a_weight / dtype.itemsize * resident.weights, rel=1e-4)
    )
    assert offloaded.optimizer == resident.host == 0
    assert offloaded.total < resident.total
    text = CliRunner().invoke(app, ["plan", "--model", str(model), "--offload-optimizer"]).stdout
    assert "GiB of optimizer state in host memory" in text


def test_routers_in_fp32_beside_bf16_are_their_own_masters(models: Path) -> None:
    folder = models / "other names of experts"
    planned = [
        plan_memory(folder, MemoryOptions(ParallelDims(), 64, dtype), role="causal_lm", trained=True)[0]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    layout = ckpt.layout_for(folder)
    routers = sum(math.prod(entry.shape) for entry in layout.canonical.values() if entry.keep_dtype)
    total = planned[1].weights // 4
    assert routers
    assert planned[0].weights == 2 * total + 2 * routers
    assert planned[0].optimizer == 12 * (total - routers) + 8 * routers


def test_one_micro_batch_alone_has_no_gradients_beside_its_activations(model: Path) -> None:
    options = MemoryOptions(ParallelDims(), 4096, torch.bfloat16)
    one, two = (
        plan_memory(model, replace(options, micro_batches=count), role="causal_lm", trained=True)[0] for count in (1, 2)
    )
    assert one.activations == two.activations
    assert one.gradients < two.gradients / 2
    (shared,) = plan_memory(model, replace(options, repeated=0.375), role="causal_lm", trained=True)
    assert shared.activations == pytest.approx(two.activations * 0.625, rel=1e-3)
    (eight,) = plan_memory(model, replace(options, float8="current"), role="causal_lm", trained=True)
    assert eight.activations < two.activations
    assert eight.weights > two.weights
