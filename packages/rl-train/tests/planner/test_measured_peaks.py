"""The plan on a CPU against peaks that an H200 had, of `benchmarks/RESULTS.md`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from parallel_layers import ModelConfig, PackedSequence, ParallelDims, linear_log_probs
from parallel_layers.kernels import planned_for
from parallel_layers.model import LoraOptions
from parallel_models import CausalLM
from rl_models import OptimizerOptions
from rl_train.planner.live_bytes import LiveBytes
from rl_train.planner.memory import GIB, MemoryOptions
from rl_train.planner.plan import plan_memory

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8, "num_attention_heads": 32, "vocab_size": 128256, "max_position_embeddings": 1 << 20,
}  # fmt: skip
SHAPE_1B = LLAMA | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPE_8B = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
ALL_LAYERS = SHAPE_8B | {"num_hidden_layers": 32}
FULL, TILED, OFFLOAD = {"recompute": "full"}, {"tiled_mlp": 8}, {"offload_activations": True}
LORA, SHARED = {"lora": LoraOptions(16)}, {"repeated": 3 / 8}


def _with_optimizer(**options: Any) -> dict[str, Any]:
    return {"optimizer": OptimizerOptions(**options)}


class Row(NamedTuple):
    """A measured row: the model, the tokens of the micro-batch, the options, and the peak in GiB."""

    model: dict[str, Any]
    tokens: int
    options: dict[str, Any]
    peak: float

    def __str__(self) -> str:
        return f"{self.model['num_hidden_layers']} layers, {self.tokens} tokens, {self.options}"


# `benchmarks/memory_options.py`, whose process keeps 0.27 GiB of earlier variants; the row of adapters with full
# recomputation is from a process of its own.
OPTIONS = [
    Row(SHAPE_1B, 16384, options, peak)
    for options, peak in (
        ({}, 36.6),
        (FULL, 22.6),
        ({"recompute": "selective"}, 25.3),
        ({"recompute": tuple(range(8))}, 27.9),
        (TILED, 24.6),
        (OFFLOAD, 23.6),
        (OFFLOAD | FULL, 22.6),
        ({"float8": "current"}, 36.0),
        ({"float8": "block"}, 36.1),
        (SHARED, 29.9),
        (SHARED | FULL, 22.1),
        ({"keep_probabilities": True}, 40.6),
        (LORA, 22.0),
        (LORA | FULL, 5.20),
        (_with_optimizer(moments="bfloat16"), 32.0),
        (_with_optimizer(moments="int8"), 29.8),
        (_with_optimizer(algorithm="muon"), 33.0),
    )
]
# `benchmarks/longest.py`.
LONGEST = [
    Row(SHAPE_8B, 16384, FULL | TILED, 46.9),
    Row(SHAPE_8B, 49152, FULL, 53.8),
    Row(SHAPE_8B, 89088, {}, 136.7),
    Row(SHAPE_8B, 90112, {}, 137.9),
    Row(SHAPE_8B, 233472, FULL, 95.9),
    Row(SHAPE_8B, 404480, FULL, 137.9),
    Row(SHAPE_8B, 709632, FULL | TILED, 137.8),
    Row(ALL_LAYERS, 280576, LORA | FULL, 135.9),
    Row(ALL_LAYERS, 368640, LORA | FULL | TILED, 134.8),
    Row(ALL_LAYERS, 361472, _with_optimizer(offload=True) | FULL | TILED, 134.1),
]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.slow if number % 3 else ())
        for number, row in enumerate([*OPTIONS, *LONGEST])
    ],
    ids=str,
)
def test_a_machine_without_a_gpu_plans_the_peaks_of_an_h200(row: Row) -> None:
    options = MemoryOptions(
        dims=ParallelDims(), tokens=row.tokens, dtype=torch.bfloat16, micro_batches=1, **row.options
    )
    (planned,) = plan_memory(row.model, options, role="causal_lm", trained=True)
    # Long packs outweigh what libraries and earlier variants keep.
    assert planned.total / GIB == pytest.approx(row.peak, rel=0.003 if row in LONGEST[2:] else 0.02), planned


# `benchmarks/hybrid.py`: GiB above the weights and their gradients.
MAMBA, ATTENTION, MLP = "linear_attention", "full_attention", "mlp"
NEMOTRON = {"model_type": "nemotron_h", "layers_block_type": [MAMBA, MLP] * 3 + [MAMBA, ATTENTION, MLP, MAMBA]}
NEMOTRON |= {"vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
NEMOTRON |= {"mamba_num_heads": 128, "mamba_head_dim": 64}
NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 4, "vocab_size": 151936, "hidden_size": 2048, "head_dim": 256}
NEXT |= {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 5632, "num_experts": 512}
NEXT |= {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "rms_norm_eps": 1e-6}
NEXT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}


@pytest.mark.parametrize(
    ("config", "tokens", "recompute", "keeps", "extra"),
    [
        pytest.param(NEMOTRON, 16384, None, True, 16.4, marks=pytest.mark.slow),
        (NEMOTRON, 262144, "full", False, 71.5),
        (NEXT, 16384, None, False, 2.3),
    ],
    ids=["Nemotron-H", "long", "Qwen3-Next"],
)
def test_layers_of_a_recurrence_count_what_their_kernels_allocate(
    config: dict[str, Any], tokens: int, recompute: Any, keeps: bool, extra: float
) -> None:
    """Mamba-2's states, and what fla-core saves; in plain torch the long pack needs 110 GiB."""
    model = ModelConfig.from_hf(config)
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    packed = PackedSequence(ids, torch.empty_like(ids), torch.empty(2, dtype=torch.int32, device="meta"), 1)
    with planned_for("cuda"):
        module = CausalLM(model, recompute=recompute, dtype=torch.bfloat16, device="meta")
        with LiveBytes([*module.parameters(), *module.buffers()]) as live:
            head: dict[str, Any] = {"entropy": False, "keep_probabilities": keeps}
            linear_log_probs(module(packed), module.head_weight, ids, **head).log_probs.sum().backward()
        gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None) / GIB
    assert live.cut() / GIB == pytest.approx(extra + gradients, rel=0.03)
