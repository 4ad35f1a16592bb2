"""Adapters on every grid of the native backend: PEFT's log-probs, values and gradients on transformers' own models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from ckpt.cli import app
from parallel_layers import ParallelDims
from parallel_layers.lora import LoraOptions
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, OptimizerOptions
from rl_models.losses import LossTerms

peft = pytest.importorskip("peft")

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LATENT = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "head_dim": 4,
}  # fmt: skip
GEMMA4 = {
    **SIZES, **EXPERTS, "enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 16, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "sliding_window": 4, "pad_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4_E2B = {
    **{field: value for field, value in GEMMA4.items() if field not in EXPERTS}, "head_dim": 8,
    "enable_moe_block": False, "attention_k_eq_v": False, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "experts": ("Qwen3Moe", SIZES | EXPERTS),
    "shared": ("Qwen3Moe", SIZES | EXPERTS),
    "latent": ("DeepseekV3", LATENT),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-e2b": ("Gemma4Text", GEMMA4_E2B),
}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Names of a model's layers: those of PEFT's target_modules, and its target_parameters.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "llama": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], []),
    "qwen2": (["q_proj", "v_proj", "up_proj", "embed_tokens", "lm_head"], []),
    "experts": (["q_proj", "k_proj", "v_proj", "o_proj"], PARAMETERS),
    "gemma4": (["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"], ["experts.gate_up_proj", "experts.down_proj"]),
    "gemma4-e2b": (["q_proj", "v_proj", "up_proj", "per_layer_model_projection", "per_layer_input_gate"], []),
    "shared": (["q_proj"], PARAMETERS),
    "latent": (["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"], []),
}
RANK, ALPHA = 3, 6.0
GRIDS = {
    "llama": [ParallelDims(), ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(pp=2), ParallelDims(cp=2)],
    "qwen2": [ParallelDims(tp=4), ParallelDims(dp=2, tp=2), ParallelDims(pp=2, tp=2)],
    "experts": [ParallelDims(tp=2), ParallelDims(dp=2, ep=2), ParallelDims(tp=2, ep=2), ParallelDims(dp=2, tp=2, ep=2)],
    "gemma4": [ParallelDims(tp=2), ParallelDims(dp=2, ep=2), ParallelDims(pp=2)],
    "gemma4-e2b": [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(pp=2, tp=2), ParallelDims(pp=4)],
    "shared": [ParallelDims(tp=2), ParallelDims(dp=2, ep=2), ParallelDims(tp=2, ep=2), ParallelDims(dp=2, tp=2, ep=2)],
    "latent": [ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(pp=2, cp=2)],
}


@cache
def mesh_of(dims: ParallelDims) -> Any:
    return dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None


def over_experts(name: str, tensor: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of PEFT's files with `join` applied over the experts [E, ...] if they share it, then repeated."""
    experts = EXPERTS["num_experts"]
    if "experts.base_layer.lora_A" in name:
        return join(tensor.view(experts, RANK, -1)).repeat(experts, 1)
    if "experts.lora_B" in name:
        return join(tensor.view(-1, RANK, experts).movedim(2, 0))[..., None].expand(-1, -1, experts).flatten(1)
    return tensor


def share(folder: Path) -> None:
    """Let experts share the outer factors of an adapter of PEFT."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    shared = {name: over_experts(name, tensor, lambda each: each[0]) for name, tensor in tensors.items()}
    assert sum(not torch.equal(shared[name], tensors[name]) for name in tensors) == 2 * SIZES["num_hidden_layers"]
    save_file({name: tensor.contiguous() for name, tensor in shared.items()}, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"shared_experts": True}))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model its checkpoint, an adapter of PEFT whose factors are not zero, and the merged model."""
    folder = tmp_path_factory.mktemp("lora")
    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        model.save_pretrained(folder / name / "base")
        modules, parameters = TARGETS[name]
        options = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=modules, target_parameters=parameters, task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(model, options)
        for key, parameter in adapted.named_parameters():
            if "lora" in key:
                torch.nn.init.normal_(parameter, 0, 0.2)
        adapted.save_pretrained(folder / name / "adapter", save_embedding_layers=False)
        if name == "shared":
            share(folder / name / "adapter")
    return folder


def batch_of(indices: list[int] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 61, (length,), generator=generator) for length in (7, 5, 6, 9)]
    batch = Batch.from_sequences(sequences, response_lengths=[5, 3, 4, 6])
    return batch if indices is None else batch.select(indices)


def loss(log_probs: Tensor, entropy: Tensor, batch: Batch) -> LossTerms:
    weights = torch.sin(1.0 + batch.tokens.double()).to(log_probs.dtype)
    return LossTerms(-log_probs * weights - 0.1 * entropy)


def by_peft(folder: Path, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """PEFT's log-probs of every token, and the gradients of its adapters by the names of its files."""
    kind = getattr(transformers, f"{MODELS[name][0].removesuffix('Text')}ForCausalLM")
    experts = {"experts_implementation": "eager"} if TARGETS[name][1] else {}  # the other one takes no fp64
    model = kind.from_pretrained(folder / name / "base", **experts).double()
    model = peft.PeftModel.from_pretrained(model, folder / name / "adapter", is_trainable=True).double()
    batch, found = batch_of(), []
    terms, tokens = torch.zeros((), dtype=torch.float64), int(batch.mask.sum())
    for ids, mask in zip(batch.split(), batch.mask.split(batch.lengths), strict=True):
        log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        own = log_p[:-1].gather(1, ids[1:, None])[:, 0]
        found.append(torch.cat([own.new_zeros(1), own]).detach())
        per_token = -own * torch.sin(1.0 + ids[1:].double()) - 0.1 * entropy[:-1]
        terms = terms + (per_token * mask[1:]).sum()
    (terms / tokens).backward()
    gradients = {
        key.replace(".default", ""): p.grad
        for key, p in model.named_parameters()
        if "lora" in key and p.grad is not None
    }
    return torch.cat(found), gradients


def on_grid(
    group: ProcessGroup | None, folder: Path, name: str, dims: ParallelDims, out: Path, backend: str = "parallel"
) -> list[Tensor]:
    """This rank's log-probs with and without adapters, after files with the gradients of all adapters."""
    optimizer = OptimizerOptions(learning_rate=1e8, eps=1e8, max_grad_norm=math.inf)
    actor = Actor.from_pretrained(
        folder / name / "base", backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu",
        max_tokens_per_micro_batch=16, lora=folder / name / "adapter", optimizer=optimizer,
    )  # fmt: skip
    if group is not None and group.rank() >= dims.world_size:
        return []
    actor.save_adapter(out / "before")
    indices = list(range(actor.grid.rank("dp"), 4, dims.dp))
    batch = batch_of(indices)
    found = [actor.log_probs(batch).log_probs, actor.log_probs(batch, adapters=False).log_probs]
    actor.save_pretrained(out / "merged")
    actor.update(batch, loss)
    actor.save_adapter(out / "after")
    return [torch.tensor(indices), *found]


def check(ranks: RankPool, folders: Path, name: str, dims: ParallelDims, out: Path, backend: str = "parallel") -> None:
    expected, gradients = by_peft(folders, name)
    arguments = folders, name, dims, out, backend
    if dims.world_size == 1:
        results = [on_grid(None, *arguments)]
    else:
        results = ranks.run(on_grid, *arguments, world=dims.world_size)
    parts = expected.split(batch_of().lengths)
    for indices, log_probs, base in results:
        whole = torch.cat([parts[i] for i in indices])
        torch.testing.assert_close(log_probs.double(), whole, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(base.double(), whole, atol=1e-2)
    stored = load_file(folders / name / "adapter" / "adapter_model.safetensors")
    before, after = (load_file(out / stage / "adapter_model.safetensors") for stage in ("before", "after"))
    assert {key: tensor.shape for key, tensor in stored.items()} == {
        key: tensor.shape for key, tensor in before.items()
    }
    assert all(torch.equal(before[key], tensor) for key, tensor in stored.items())
    if name == "shared":
        gradients = {key: over_experts(key, g, lambda each: each.sum(0)) for key, g in gradients.items()}
    for key, gradient in gradients.items():
        # The first step of AdamW with so large an epsilon is the gradient: lr g / (|g| + eps), 1e-8 |g| off.
        step = (before[key] - after[key]).double()
        torch.testing.assert_close(step, gradient, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


CASES = [pytest.param(name, dims, id=f"{name} {dims}") for name, grids in GRIDS.items() for dims in grids]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dims"), CASES)
def test_every_grid_gives_what_peft_gives(
    ranks: RankPool, folders: Path, name: str, dims: ParallelDims, tmp_path: Path
) -> None:
    check(ranks, folders, name, dims, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(dp=2), ParallelDims(cp=2), ParallelDims(dp=2, cp=2)])
def test_the_patched_model_gives_what_peft_gives(
    ranks: RankPool, folders: Path, dims: ParallelDims, tmp_path: Path
) -> None:
    check(ranks, folders, "llama", dims, tmp_path, "transformers")
    native = Actor.from_pretrained(folders / "llama" / "base", lora=LoraOptions(RANK, ALPHA, seed=5))
    patched = Actor.from_pretrained(
        folders / "llama" / "base", backend="transformers", lora=LoraOptions(RANK, ALPHA, seed=5)
    )
    for name, model in (("native", native), ("patched", patched)):
        model.save_adapter(tmp_path / name)
    stored = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("native", "patched")]
    assert stored[0] == stored[1]


def test_the_patched_model_refuses_what_it_lacks(folders: Path) -> None:
    for name, target in (("qwen2", "lm_head"), ("experts", "experts.down_proj")):
        with pytest.raises(ValueError, match=f"offers adapters of the layers' linears, and not of .*{target}"):
            Actor.from_pretrained(folders / name / "base", backend="transformers", lora=LoraOptions(targets=[target]))


@pytest.mark.parametrize("name", ["llama", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_grid_gives_what_peft_gives(ranks: RankPool, folders: Path, name: str, tmp_path: Path) -> None:
    check(ranks, folders, name, ParallelDims(tp=2), tmp_path)


def test_experts_that_share_a_factor_must_agree(folders: Path, tmp_path: Path) -> None:
    file = "adapter_model.safetensors"
    for each in (folders / "shared" / "adapter").iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    save_file(load_file(folders / "experts" / "adapter" / file), tmp_path / file, metadata={"format": "pt"})
    config = json.loads((folders / "experts" / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"shared_experts": True}))
    with pytest.raises(ValueError, match="differs between experts, and shared_experts says that they share it"):
        Actor.from_pretrained(folders / "shared" / "base", lora=tmp_path)
    with pytest.raises(ValueError, match="shared_experts=True, and targets='all-linear' has no experts; add"):
        Actor.from_pretrained(folders / "shared" / "base", lora=LoraOptions(shared_experts=True))


def written(group: ProcessGroup | None, folder: Path, dims: ParallelDims, out: Path) -> None:
    """Write an adapter and merged weights; learn for a step, save, and learn for another one."""
    options = {"dims": dims, "mesh": mesh_of(dims), "device": "cpu", "optimizer": OptimizerOptions(learning_rate=1e-2)}
    actor = Actor.from_pretrained(folder / "base", lora=folder / "adapter", **options)
    actor.save_adapter(out / "adapter")
    actor.save_pretrained(out / "merged")
    batch = batch_of(list(range(actor.grid.rank("dp"), 4, dims.dp)))
    actor.update(batch, loss)
    actor.save_training(out / "training")
    actor.update(batch, loss)
    actor.save_adapter(out / "learned")


def resumed(group: ProcessGroup | None, folder: Path, dims: ParallelDims, out: Path) -> None:
    options = {"dims": dims, "mesh": mesh_of(dims), "device": "cpu", "optimizer": OptimizerOptions(learning_rate=1e-2)}
    lora = LoraOptions(RANK, ALPHA, TARGETS["experts"][0] + PARAMETERS)
    actor = Actor.from_pretrained(folder / "base", lora=lora, **options)
    actor.load_training(out / "training")
    actor.update(batch_of(list(range(actor.grid.rank("dp"), 4, dims.dp))), loss)
    actor.save_adapter(out / "resumed")


def test_files_are_those_of_peft_and_alike_from_every_grid(ranks: RankPool, folders: Path, tmp_path: Path) -> None:
    folder = folders / "experts"
    written(None, folder, ParallelDims(), tmp_path / "one")
    ranks.run(written, folder, ParallelDims(dp=2, tp=2, ep=2), tmp_path / "four", world=4)
    ranks.run(resumed, folder, ParallelDims(pp=2), tmp_path / "four", world=2)
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "merged/model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "four" / file).read_bytes()
    facts = CliRunner().invoke(app, ["inspect", str(tmp_path / "four" / "training"), "--json"]).stdout
    assert json.loads(facts)["tensors"] == len(load_file(tmp_path / "one/learned/adapter_model.safetensors"))
    learned, again = (
        load_file(tmp_path / place / "adapter_model.safetensors") for place in ("one/learned", "four/resumed")
    )
    for name, tensor in learned.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5)
    # What was written loads into PEFT, whose merged weights are those that were written.
    kind, ids = transformers.Qwen3MoeForCausalLM, torch.arange(12)[None]
    base = kind.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "four" / "adapter")
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(model)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    merged = kind.from_pretrained(tmp_path / "four" / "merged")
    for ours, theirs in zip(merged.parameters(), model.merge_and_unload().parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(merged(ids).logits).all()


def curve(group: ProcessGroup | None, folder: Path, dims: ParallelDims) -> list[float]:
    actor = Actor.from_pretrained(
        folder / "base", dims=dims, mesh=mesh_of(dims), device="cpu", lora=LoraOptions(4, 8.0, seed=2),
        optimizer=OptimizerOptions(learning_rate=1e-2),
    )  # fmt: skip
    batch = batch_of(list(range(actor.grid.rank("dp"), 4, dims.dp)))
    return [actor.update(batch, lambda log_probs, entropy, part: LossTerms(-log_probs))["loss"] for _ in range(20)]


@pytest.mark.slow
def test_twenty_steps_are_the_same_on_two_grids(ranks: RankPool, folders: Path) -> None:
    one = curve(None, folders / "llama", ParallelDims())
    (four, *_) = ranks.run(curve, folders / "llama", ParallelDims(pp=2, tp=2), world=4)
    assert one[-1] < 0.5 * one[0]
    torch.testing.assert_close(four, one, rtol=1e-3, atol=1e-3)
