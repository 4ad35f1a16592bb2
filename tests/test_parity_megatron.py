"""`backend="megatron"` against one rank of another backend: outputs, gradients, one step, what is decoded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool, shared_pool
from rl_models import Actor, Batch, Critic, OptimizerOptions
from rl_models.backends import PipelineOptions
from rl_models.losses import LossTerms

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    "deepseek-v3": ("DeepseekV3", LATENT),
}
REFERENCES = {"llama": "parallel", "qwen3": "transformers", "qwen3-moe": "transformers", "deepseek-v3": "parallel"}
PLACES = {
    "one": (ParallelDims(), 1),
    "tp2": (ParallelDims(tp=2), 1),
    "dp2": (ParallelDims(dp=2), 1),
    "cp2": (ParallelDims(cp=2), 1),
    "pp2": (ParallelDims(pp=2), 1),
    "pp2 vpp2": (ParallelDims(pp=2), 2),
    "ep2": (ParallelDims(dp=2, ep=2), 1),
    "tp2 ep2": (ParallelDims(tp=2, ep=2), 1),
    "tp2 pp2": (ParallelDims(tp=2, pp=2), 1),
    "tp2 dp2": (ParallelDims(tp=2, dp=2), 1),
}
PLAIN = {("llama", "tp2"), ("llama", "dp2"), ("qwen3", "pp2"), ("qwen3-moe", "ep2")}
CASES = [
    pytest.param(name, place, marks=() if (name, place) in PLAIN else pytest.mark.slow)
    for name in MODELS
    for place in PLACES
    if name in ("qwen3-moe", "deepseek-v3") or "ep" not in place
]
GPU_CASES = [
    pytest.param(name, place, marks=pytest.mark.gpu(dims.world_size))
    for name in MODELS
    for place, (dims, _) in PLACES.items()
    if name in ("qwen3-moe", "deepseek-v3") or "ep" not in place
]


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("megatron")
    for name, (kind, extra) in MODELS.items():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra}, num_labels=1)
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder / name / "actor")
        getattr(transformers, f"{kind}ForTokenClassification")(config).save_pretrained(folder / name / "critic")
    return folder


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    with RankPool(min(torch.cuda.device_count(), 4), backend="nccl") as pool:
        yield pool


@contextlib.contextmanager
def device_for(backend: str, device: str) -> Iterator[None]:
    from megatron_utils.testing import cpu_stand_in

    with cpu_stand_in() if (backend, device) == ("megatron", "cpu") else contextlib.nullcontext():
        yield


def options(group: ProcessGroup, backend: str, dims: ParallelDims, virtual_stages: int, device: str) -> dict[str, Any]:
    return {
        "backend": backend,
        "dims": dims,
        "mesh": dims.build_mesh(device.partition(":")[0], list(range(group.size()))) if group.size() > 1 else None,
        "device": device,
        "max_tokens_per_micro_batch": 24,
        **({"pipeline": PipelineOptions(virtual_stages=virtual_stages)} if virtual_stages > 1 else {}),
        # So large an epsilon makes AdamW's first step proportional to the gradient.
        "optimizer": OptimizerOptions(learning_rate=1e5, eps=1e5, max_grad_norm=math.inf),
    }


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 23, 8, 2, 13)
    rows = [torch.randint(83, (n,), generator=generator) for n in lengths]
    return Batch.from_sequences(rows, advantages=[torch.randn(n, generator=generator) for n in lengths])


def policy_loss(log_probs: Tensor, entropy: Tensor, own: Batch) -> LossTerms:
    return LossTerms(own["advantages"] * log_probs - 0.1 * entropy, {"entropy": entropy})


def value_loss(values: Tensor, own: Batch) -> LossTerms:
    return LossTerms((values - own["advantages"]).square(), {})


def train(
    group: ProcessGroup,
    folder: Path,
    backend: str,
    dims: ParallelDims,
    virtual_stages: int,
    out: Path,
    device: str = "cpu",
) -> dict[str, Any]:
    """What actor and critic give before a step, what the actor generates, and the step, which they save."""
    # Megatron-Core computes on the current device, which is each rank's own.
    device = device if device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    with device_for(backend, device):
        settings = options(group, backend, dims, virtual_stages, device)
        actor = Actor.from_pretrained(folder / "actor", **settings)
        critic = Critic.from_pretrained(folder / "critic", **settings)
        batch = make_batch()
        indices = list(range(actor.grid.rank("dp"), len(batch), dims.dp))
        part = batch.select(indices)
        outputs = torch.stack([*actor.log_probs(part, temperature=1.3), critic.values(part)])
        generated = actor.generate(
            [[1, 2, 3], [4], [5, 6]][: 3 - actor.grid.rank("dp")], max_new_tokens=4, temperature=0.0
        )
        scored = actor.log_probs(generated).log_probs
        torch.testing.assert_close(generated["log_probs"][generated.mask], scored[generated.mask], rtol=0, atol=1e-4)
        metrics = [actor.update(part, policy_loss, temperature=1.3), critic.update(part, value_loss)]
        actor.save_pretrained(out / "actor")
        critic.save_pretrained(out / "critic")
    return {
        "where": batch.positions(indices),
        "outputs": outputs,
        "metrics": metrics,
        "generated": generated.responses(),
    }


@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_megatron_backend_computes_what_the_others_do(
    ranks: RankPool, checkpoints: Path, tmp_path: Path, name: str, place: str
) -> None:
    dims, virtual_stages = PLACES[place]
    arguments = checkpoints / name, "megatron", dims, virtual_stages, tmp_path / "actual"
    expected = reference(ranks, checkpoints, tmp_path, name)
    results = ranks.run(train, *arguments, world=dims.world_size, timeout=120)
    assert_equal(results, expected, checkpoints / name, tmp_path, tolerance=1e-5)


@pytest.mark.parametrize(("name", "place"), GPU_CASES)
def test_the_megatron_backend_on_gpus(
    ranks: RankPool, nccl_ranks: RankPool, checkpoints: Path, tmp_path: Path, name: str, place: str
) -> None:
    dims, virtual_stages = PLACES[place]
    arguments = checkpoints / name, "megatron", dims, virtual_stages, tmp_path / "actual", "cuda"
    expected = reference(ranks, checkpoints, tmp_path, name)
    results = nccl_ranks.run(train, *arguments, world=dims.world_size)
    assert_equal(results, expected, checkpoints / name, tmp_path, tolerance=1e-4)


def reference(ranks: RankPool, checkpoints: Path, out: Path, name: str) -> dict[str, Any]:
    """What one rank of another backend gives, saved under "expected"."""
    arguments = checkpoints / name, REFERENCES[name], ParallelDims(), 1, out / "expected"
    (expected,) = ranks.run(train, *arguments, world=1)
    return expected


def assert_equal(
    results: list[dict[str, Any]], expected: dict[str, Any], start: Path, out: Path, *, tolerance: float
) -> None:
    for result in results:
        outputs = expected["outputs"][:, result["where"]]
        torch.testing.assert_close(result["outputs"], outputs, rtol=tolerance, atol=tolerance)
        for response, other in zip(result["generated"], expected["generated"], strict=False):
            assert torch.equal(response, other)
        for own, other in zip(result["metrics"], expected["metrics"], strict=True):
            assert own == pytest.approx(other, rel=10 * tolerance, abs=tolerance)
    for kind in ("actor", "critic"):
        before, after, actual = (
            load_file(folder / kind / "model.safetensors") for folder in (start, out / "expected", out / "actual")
        )
        assert before.keys() == after.keys() == actual.keys()
        for key, value in after.items():
            step = value - before[key]
            # The difference of two parameters is rounded as these are.
            atol = 10 * tolerance * step.abs().max().item() + 1e-6 * before[key].abs().max().item()
            torch.testing.assert_close(actual[key], value, rtol=0, atol=atol, msg=f"{kind} {key}")
