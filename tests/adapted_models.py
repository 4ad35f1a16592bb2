"""Models with adapters of PEFT, and what actors on a grid must give for them; for the tests of adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms


def peft() -> Any:
    """Return the package, which takes two seconds to import."""
    return pytest.importorskip("peft")


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
    "partly": ("Qwen2", SIZES),
    "routed": ("Qwen3Moe", SIZES | EXPERTS),
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
    "partly": (["q_proj", "v_proj", "up_proj"], []),
    "routed": (["k_proj", "o_proj"], []),
}
RANK, ALPHA = 3, 6.0


@cache
def mesh_of(dims: ParallelDims, device: str = "cpu") -> Any:
    return dims.build_mesh(device, list(range(dims.world_size))) if dims.world_size > 1 else None


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


def save_adapted(folder: Path, names: Sequence[str]) -> Path:
    """Save for each model its checkpoint, and an adapter of PEFT whose factors are not zero."""
    for name in names:
        kind, sizes = MODELS[name]
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        model.save_pretrained(folder / name / "base")
        modules, parameters = TARGETS[name]
        options = peft().LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=modules, target_parameters=parameters, task_type="CAUSAL_LM"
        )
        adapted = peft().get_peft_model(model, options)
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


def loss(inputs: LossInputs) -> LossTerms:
    weights = torch.sin(1.0 + inputs.batch.tokens.double()).to(inputs.log_probs.dtype)
    return LossTerms(-inputs.log_probs * weights - 0.1 * inputs.entropy)


def by_peft(folder: Path, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """PEFT's log-probs of every token, and the gradients of its adapters by the names of its files."""
    kind = getattr(transformers, f"{MODELS[name][0].removesuffix('Text')}ForCausalLM")
    experts = (
        {"experts_implementation": "eager"} if "num_experts" in MODELS[name][1] else {}
    )  # the other one takes no fp64
    model = kind.from_pretrained(folder / name / "base", **experts).double()
    model = peft().PeftModel.from_pretrained(model, folder / name / "adapter", is_trainable=True).double()
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
    group: ProcessGroup | None,
    folder: Path,
    name: str,
    dims: ParallelDims,
    out: Path,
    backend: str = "parallel",
    sequence_parallel: bool | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """This rank's log-probs with and without adapters, after files with the gradients of all adapters."""
    optimizer = OptimizerOptions(learning_rate=1e8, eps=1e8, max_grad_norm=math.inf)
    place = device if device == "cpu" else f"{device}:{torch.cuda.current_device()}"
    with device_of(backend, device):
        actor = Actor.from_pretrained(
            folder / name / "base", backend=backend, dims=dims, mesh=mesh_of(dims, device), device=place,
            optimizer=optimizer, max_tokens_per_micro_batch=16, lora=folder / name / "adapter",
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        actor.save_adapter(out / "before")
        indices = list(range(actor.grid.rank("dp"), 4, dims.dp))
        batch = batch_of(indices)
        found = [actor.log_probs(batch).log_probs, actor.log_probs(batch, adapters=False).log_probs]
        actor.save_pretrained(out / "merged")
        actor.update(batch, loss)
        actor.save_adapter(out / "after")
    return [torch.tensor(indices), *found]


def device_of(backend: str, device: str = "cpu") -> AbstractContextManager[None]:
    """Let Megatron-Core compute on the CPU."""
    return cpu_stand_in() if (backend, device) == ("megatron", "cpu") else nullcontext()


def check(ranks: RankPool, folders: Path, name: str, dims: ParallelDims, out: Path, *more: Any) -> None:
    """Compare with PEFT; `more` are further arguments of `on_grid`."""
    expected, gradients = by_peft(folders, name)
    near = 1e-4 if "cuda" in more else 1e-5
    arguments = folders, name, dims, out, *more
    if dims.world_size == 1 and "megatron" not in more:
        results = [on_grid(None, *arguments)]
    else:
        results = ranks.run(on_grid, *arguments, world=dims.world_size)
    parts = expected.split(batch_of().lengths)
    for indices, log_probs, base in results:
        whole = torch.cat([parts[i] for i in indices])
        torch.testing.assert_close(log_probs.double(), whole, rtol=near, atol=near)
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
        torch.testing.assert_close(step, gradient, rtol=0, atol=near, msg=lambda text, key=key: f"{key}: {text}")


def actor_on(folder: Path, dims: ParallelDims, lora: Any, backend: str = "parallel", **options: Any) -> Actor:
    return Actor.from_pretrained(
        folder / "base", backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu", lora=lora,
        optimizer=OptimizerOptions(learning_rate=1e-2), **options,
    )  # fmt: skip


def written(
    group: ProcessGroup | None, folder: Path, dims: ParallelDims, out: Path, backend: str = "parallel", **options: Any
) -> None:
    """Write an adapter and merged weights; learn for a step, save, and learn for another one."""
    with device_of(backend):
        actor = actor_on(folder, dims, folder / "adapter", backend, **options)
        actor.save_adapter(out / "adapter")
        actor.save_pretrained(out / "merged")
        batch = batch_of(list(range(actor.grid.rank("dp"), 4, dims.dp)))
        actor.update(batch, loss)
        actor.save_training(out / "training")
        actor.update(batch, loss)
        actor.save_adapter(out / "learned")
        streams = [dict(actor.stream_weights(adapter=adapter)) for adapter in (True, False)]
        actor.save_pretrained(out / "learned-merged")
    for stream, file in zip(streams, ("learned/adapter_model", "learned-merged/model"), strict=True):
        stored = load_file(out / f"{file}.safetensors")
        assert stream.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in stream.items())


def resumed(
    group: ProcessGroup | None,
    folder: Path,
    dims: ParallelDims,
    out: Path,
    backend: str = "parallel",
    targets: list[str] | None = None,
) -> None:
    lora = LoraOptions(RANK, ALPHA, targets or TARGETS["experts"][0] + PARAMETERS)
    with device_of(backend):
        actor = actor_on(folder, dims, lora, backend)
        actor.load_training(out / "training")
        actor.update(batch_of(list(range(actor.grid.rank("dp"), 4, dims.dp))), loss)
        actor.save_adapter(out / "resumed")


def curve(
    group: ProcessGroup | None, folder: Path, dims: ParallelDims, backend: str = "parallel", dropout: float = 0.0
) -> list[float]:
    with device_of(backend):
        actor = actor_on(folder, dims, LoraOptions(4, 8.0, seed=2, dropout=dropout), backend)
        batch = batch_of(list(range(actor.grid.rank("dp"), 4, dims.dp)))
        return [actor.update(batch, lambda inputs: LossTerms(-inputs.log_probs))["loss"] for _ in range(20)]
