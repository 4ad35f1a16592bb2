"""FLOPs from the config alone, against what torch counts while models of transformers run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ckpt import Checkpoint
from parallel_layers import ModelConfig
from parallel_layers.linear_attention import GatedDeltaNetConfig, Mamba2Config
from parallel_layers.model import LoraOptions
from rl_train.planner.flops import _OF_A_STATE, ModelFlops, causal_pairs, peak_flops

TOKENS = 48
FAMILIES = [
    *("llama", "mixture", "norms over all heads", "latent", "shared kv", "hybrid", "one mixer a layer"),
    *("parallel blocks", "other names of experts"),
]


def counted(module: Any, backward: bool = False) -> Counter[str]:
    """FLOPs by operator of one sequence of TOKENS, without those of rotary embeddings."""
    ids = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        logits = module(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    counts = counter.get_flop_counts()
    total = Counter({str(name): number for name, number in counts["Global"].items()})
    for name, rotary in counts.items():
        if name.endswith("rotary_emb"):
            total.subtract({str(operator): number for operator, number in rotary.items()})
    return total


def load(path: Path) -> Any:
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_has_as_many_flops_as_torch_counts(models: Path, family: str) -> None:
    flops = ModelFlops.of(Checkpoint(models / family))
    model = load(models / family)
    counts = counted(model)
    convolutions = counts["aten.convolution"] * TOKENS / (TOKENS + 3)  # transformers computes 3 outputs too many
    assert counts["aten.mm"] + counts["aten.addmm"] + convolutions == 2 * flops.weights * TOKENS
    # transformers computes the whole square of attention, and a linear attention by chunks, with other products.
    if not flops.states:
        assert counts["aten.bmm"] == sum(2 * pair * TOKENS**2 for _, pair in flops.pairs)
    else:
        assert counts["aten.bmm"] > sum(2 * pair * TOKENS**2 for _, pair in flops.pairs) > 0
    assert flops.forward([TOKENS]) == 2 * (
        (flops.weights + flops.states) * TOKENS
        + sum(pair * causal_pairs([TOKENS], window) for window, pair in flops.pairs)
    )


def test_a_backward_has_twice_the_flops_of_the_forward(model: Path) -> None:
    flops = ModelFlops.of(Checkpoint(model))
    square = sum(2 * pair * (TOKENS**2 - causal_pairs([TOKENS])) for _, pair in flops.pairs)
    assert counted(load(model), backward=True).total() == flops.update([TOKENS]) + 3 * square


def test_frozen_weights_have_no_gradient(model: Path) -> None:
    lora = LoraOptions(rank=4, targets=("q_proj", "down_proj"))
    flops = ModelFlops.of(Checkpoint(model), lora=lora)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(load(model), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    adapted.enable_input_require_grads()  # else the first layer has no gradient of its input
    square = sum(2 * pair * (TOKENS**2 - causal_pairs([TOKENS])) for _, pair in flops.pairs)
    assert counted(adapted, backward=True).total() == flops.update([TOKENS]) + 3 * square
    assert flops.adapters == 4 * 4 * (128 + 128 + 352 + 128), "in 4 layers"
    assert flops.update([TOKENS]) < ModelFlops.of(Checkpoint(model)).update([TOKENS])


def test_a_value_head_takes_the_place_of_the_vocabulary(model: Path) -> None:
    policy, critic = (ModelFlops.of(Checkpoint(model), role) for role in ("causal_lm", "value"))
    assert policy.weights - critic.weights == 999 * 128


@pytest.mark.parametrize(
    ("config", "products"),
    [
        (GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6), 3),
        (Mamba2Config(num_heads=4, head_dim=6, num_groups=1, state_size=8), 2),
    ],
)
def test_a_state_is_read_and_written_for_each_token(config: Any, products: int) -> None:
    shape = config.state_shape()
    heads, keys, values = shape.num_heads, shape.key_dim, shape.value_dim
    state, key, value, query = (
        torch.randn(heads, *size) for size in ((keys, values), (keys, 1), (1, values), (1, keys))
    )
    with FlopCounterMode(display=False) as counter:
        if products == 3:
            value = value - key.mT @ state
        query @ (state + key @ value)
    assert counter.get_total_flops() == 2 * _OF_A_STATE[type(config).__name__] * heads * keys * values


def test_pairs_are_those_of_the_mask() -> None:
    distance = torch.arange(9)[:, None] - torch.arange(9)
    for window in (None, 1, 4, 9, 20):
        mask = (distance >= 0) & (distance < (window or 99))
        lengths = [9, 5, 0, 1]
        assert causal_pairs(lengths, window) == sum(int(mask[:n, :n].sum()) for n in lengths)


def test_a_mixture_of_a_published_size_has_its_active_weights() -> None:
    # Qwen3-30B-A3B: 3.3 billion active weights, of which the embedding of 151936 x 2048 is looked up.
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    flops = ModelFlops.of(ModelConfig.from_hf(config))
    assert flops.weights + 151936 * 2048 == pytest.approx(3.35e9, rel=0.01)


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA H200", torch.float32, 67),
        ("NVIDIA H200 NVL", torch.float16, 835),
        ("NVIDIA H800 PCIe", torch.bfloat16, 756),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989),
        ("NVIDIA H20", torch.bfloat16, 148),
        ("NVIDIA H20-3e", torch.bfloat16, 148),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40G", torch.bfloat16, None),
        ("NVIDIA A100X", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("AMD Instinct MI300X", torch.bfloat16, 1307),
        ("AMD Instinct MI355X", torch.bfloat16, 2517),
        ("AMD Instinct MI300A", torch.bfloat16, None),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("Tesla V100S-PCIE-32GB", torch.float32, 16.4),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, None),
        ("NVIDIA A1000", torch.bfloat16, None),
        ("cpu", torch.float32, None),
    ],
)
def test_devices_have_their_peak(device: str, dtype: torch.dtype, tflops: float | None) -> None:
    assert peak_flops(device, dtype) == (None if tflops is None else tflops * 1e12)
