"""The native models against transformers: log-probs, entropies, values and every gradient, over tensor-parallel grids.

Packed ragged batches, whose total no tp divides, against transformers run on one sequence at a time, from the same
checkpoint files; gradients come back through ckpt's layouts, as if they were weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic
from rl_models.division import shift_to_own_token

LENGTHS = (11, 1, 17, 6)
VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "num_key_value_heads": 4,
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied-llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-window-tied": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, attention_bias=True)),
    "apertus": lambda: ApertusForCausalLM(ApertusConfig(**SIZES, rope_parameters=LLAMA3)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, norm_topk_prob=True, mlp_only_layers=[1])
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, sliding_window=5)),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **DEEPSEEK})),
    "llama-value": lambda: LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=1, attention_bias=True)),
}
# Tensors of a checkpoint that are no parameters.
WITHOUT_GRADIENT = ("e_score_correction_bias", "act_fn.beta", "act_fn.eps")
GRIDS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def checkpoint(folder: Path, name: str) -> tuple[Path, PreTrainedModel]:
    """The model and its files; no parameter is 0 or 1, as the biases and norms of a new model are."""
    torch.manual_seed(sum(map(ord, name)))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 0.15 * noise)
    path = folder / name
    if not path.exists():
        model.save_pretrained(path)
    return path, model


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    weights = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in ("a", "b")}
    return Batch.from_sequences(rows, **weights)


def reference(
    model: PreTrainedModel, batch: Batch, temperature: float, folder: Path
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """transformers, one sequence at a time: results `[T]` aligned with their own token, and gradients.

    These go through a checkpoint in `folder`, since transformers' parameters need not be the tensors of its files.
    """
    columns: list[list[Tensor]] = []
    for tokens in batch.split():
        output = model(tokens[None]).logits[0].double()
        if output.shape[-1] == 1:
            columns.append([torch.cat([output.new_zeros(1), output[:-1, 0]])])
            continue
        predicted = (output / temperature).log_softmax(-1)
        log_probs = predicted[:-1].gather(-1, tokens[1:, None])[:, 0]
        entropy = -(predicted.exp() * predicted).sum(-1)[:-1]
        columns.append([torch.cat([output.new_zeros(1), column]) for column in (log_probs, entropy)])
    results = [torch.cat(column) for column in zip(*columns, strict=True)]
    weighted = zip(results, (batch["a"], batch["b"]), strict=False)
    torch.stack([(result * weight).sum() for result, weight in weighted]).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    return [result.detach() for result in results], load_file(folder / "model.safetensors")


def run_native(
    group: ProcessGroup, path: Path, sequence_parallel: bool, temperature: float, gradients: Path
) -> list[Tensor]:
    """Results `[T]`, and the gradients written as a checkpoint."""
    tp = group.size()
    dims = ParallelDims(tp=tp)
    mesh = dims.build_mesh("cpu", list(range(tp)))
    kind = Critic if "value" in path.name else Actor
    worker = kind.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", sequence_parallel=sequence_parallel)
    batch = make_batch()
    packed = batch.packed(multiple_of=worker.engine.tokens_multiple_of)
    results: list[Tensor] = []

    def loss(number: int, outputs: tuple[Tensor, ...]) -> Tensor:
        results[:] = [shift_to_own_token(output, batch) for output in outputs]
        weighted = zip(results, (batch["a"], batch["b"]), strict=False)
        return torch.stack([(result * weight).sum() for result, weight in weighted]).sum()

    worker.engine.forward_backward([packed], loss, temperature=temperature)
    model = worker.engine.module
    local = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    local |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    layout = ckpt.layout_for(path, role=worker.role)
    ckpt.save_hf(gradients, local, layout, ckpt.Place(tp=(group.rank(), tp)), group=group)
    return results


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"tp{grid[0]}{'-sp' * grid[1]}")
@pytest.mark.parametrize("name", MODELS)
def test_native_models_equal_transformers(
    ranks: RankPool, folder: Path, tmp_path: Path, name: str, grid: tuple[int, bool]
) -> None:
    path, model = checkpoint(folder, name)
    tp, sequence_parallel = grid
    temperature = 0.8
    batch = make_batch()
    expected, expected_gradients = reference(model, batch, temperature, tmp_path / "expected")
    gathered = tmp_path / "gradients"
    per_rank = ranks.run(run_native, path, sequence_parallel, temperature, gathered, world=tp, timeout=120)
    for results in per_rank:
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(results, per_rank[0], strict=True))
    actual_gradients = load_file(gathered / "model.safetensors")
    assert actual_gradients.keys() == expected_gradients.keys()
    for parameter, wanted in expected_gradients.items():
        if parameter.endswith(WITHOUT_GRADIENT):
            continue
        difference = (actual_gradients[parameter] - wanted).norm() / wanted.norm()
        # xIELU's are sums over all tokens and channels, most of which cancels.
        limit = 1e-4 if "act_fn.alpha" in parameter else 1e-5
        assert difference <= limit, f"{parameter}: relative difference {difference:.2e}"
        torch.testing.assert_close(
            actual_gradients[parameter], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()), msg=parameter
        )
