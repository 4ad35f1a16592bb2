"""The native models against transformers: log-probs, entropies, values and every gradient, over grids of every axis.

Packed ragged batches, whose total no tp divides, against transformers run on one sequence at a time, from the same
checkpoint files; gradients come back through ckpt's layouts, as if they were weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.canonical import canonical
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from transformers import PreTrainedModel

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, PipelineOptions
from rl_models.api import Worker
from rl_models.calls import accumulate
from rl_models.losses import LossTerms

LENGTHS = (11, 1, 17, 6)
VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # transformers keeps the gradient of a padding token at 0.
    "pad_token_id": None,
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
ROUTED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "num_key_value_heads": 4,
}
DEEPSEEK = {**ROUTED, **LATENT}
WINDOWED = {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SOFTCAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
}
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
}
GEMMA4 = {
    **{**WINDOWED, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"hidden_size_per_layer_input": 0, "rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 5.0},
}
GEMMA4_MOE = {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4},
    "llama_4_scaling_beta": 0.5,
}
LONGROPE = {
    **{
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 17,
    },
    **{"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0]},
}
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7}
MULTIPLIERS |= {"attention_multiplier": 0.3}
TOWER = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
DEEPSTACK = {**TOWER, "deepstack_visual_indexes": [0]}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
PIXTRAL |= {"intermediate_size": 24, "image_size": 8, "patch_size": 2}
KIMI_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
HALF_SECTIONS = {**SECTIONS, "partial_rotary_factor": 0.5}
LINEAR = {
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 3},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
}

# With a smaller epsilon the norm of linear attention's output is too steep for fp32 where the output is near 0.
LINEAR["rms_norm_eps"] = 1e-3
LINEAR_MOE = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24}
KIMI_LINEAR = {name: size for name, size in DEEPSEEK.items() if name != "n_routed_experts"}
KIMI_LINEAR |= {"num_local_experts": 4, "q_lora_rank": None, "layer_types": LINEAR["layer_types"], "rms_norm_eps": 1e-3}
KIMI_LINEAR |= {"linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 3}
# One group of heads, which tensor-parallel ranks share.
GRANITE_HYBRID = {**MULTIPLIERS, "layer_types": LINEAR["layer_types"], "mamba_n_heads": 4, "mamba_d_head": 16}
GRANITE_HYBRID |= {"mamba_d_state": 6, "mamba_d_conv": 3, "shared_intermediate_size": 24, "rms_norm_eps": 1e-3}
GRANITE_HYBRID |= {"num_local_experts": 0, "position_embedding_type": "rope"}
GRANITE_HYBRID_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": None}
# One mixer a layer: four layers for two of another family.
NEMOTRON = {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 16, "mamba_num_heads": 4}
NEMOTRON |= {"mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 6, "conv_kernel": 3, "layer_norm_epsilon": 1e-3}
NEMOTRON |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "time_step_min": 0.3}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 24, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
# By the prefix of its classes in transformers, and what its config says beside `SIZES`.
# transformers 5.19 writes its default of the factor beside these parameters.
HALF_ROTATED = {"rope_parameters": HALF_SECTIONS, "partial_rotary_factor": 0.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-tied": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "glm4-moe": ("Glm4Moe", {**ROUTED, "head_dim": 8, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-lite": ("Glm4MoeLite", {**ROUTED, **LATENT}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "mlp_bias": True, "attention_out_bias": True}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "gpt-oss": ("GptOss", {**EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 5, "swiglu_limit": 0.3}),
    "gemma2": ("Gemma2", {**WINDOWED, "query_pre_attn_scalar": 10, **SOFTCAPS}),
    "gemma3": ("Gemma3Text", {**WINDOWED, "rope_parameters": GEMMA3_ROPE, "tie_word_embeddings": False}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-moe": ("Gemma4Text", GEMMA4_MOE),
    "gemma4-e2b": (
        "Gemma4Text",
        {
            **{**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
            **{"attention_k_eq_v": False, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        },
    ),
    "gemma4-own-values": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": False, "tie_word_embeddings": False}),
    "olmo3": ("Olmo3", {**WINDOWED, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "exaone4": ("Exaone4", WINDOWED),
    "granite": ("Granite", {**MULTIPLIERS, "mlp_bias": True}),
    "granitemoe": ("GraniteMoe", {**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "ernie": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "minimax": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4}),
    "phi3": ("Phi3", {"sliding_window": 5}),
    "phi3-longrope": ("Phi3", {"original_max_position_embeddings": 17, "rope_parameters": LONGROPE}),
    # With text alone, so the towers have gradients of zero.
    "qwen2-vl": (
        "Qwen2VL",
        {
            "rope_parameters": SECTIONS,
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        },
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": SECTIONS, "vision_config": TOWER}),
    "qwen3-vl": ("Qwen3VL", {"rope_parameters": SECTIONS, "head_dim": 8, "vision_config": DEEPSTACK}),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "rope_parameters": SECTIONS,
            "head_dim": 8,
            "vision_config": DEEPSTACK,
        },
    ),
    "qwen3-next": ("Qwen3Next", {**LINEAR_MOE, "mlp_only_layers": [1], "attention_bias": True}),
    "qwen3.5": ("Qwen3_5Text", LINEAR),
    "qwen3.5-moe": ("Qwen3_5MoeText", LINEAR_MOE),
    "qwen3.5-vl": ("Qwen3_5", {**LINEAR, **HALF_ROTATED, "vision_config": TOWER}),
    "qwen3.5-moe-vl": ("Qwen3_5Moe", {**LINEAR_MOE, **HALF_ROTATED, "vision_config": TOWER}),
    "olmo-hybrid": ("OlmoHybrid", {**LINEAR, "attention_bias": True}),
    "kimi-linear": ("KimiLinear", KIMI_LINEAR),
    "granite-hybrid": ("GraniteMoeHybrid", GRANITE_HYBRID),
    "granite-hybrid-moe": ("GraniteMoeHybrid", {**GRANITE_HYBRID, **GRANITE_HYBRID_MOE}),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h-biases": (
        "NemotronH",
        {**NEMOTRON, "layer_types": NEMOTRON["layer_types"][::2] + ["mlp"] * 2, "mlp_bias": True},
    ),
    "nemotron-h-latent": ("NemotronH", {**NEMOTRON, "moe_latent_size": 12, "use_bias": True}),
    "glm4v": (
        "Glm4v",
        {"hidden_size": 64, "rope_parameters": HALF_SECTIONS, "vision_config": {**TOWER, "out_hidden_size": 64}},
    ),
    "glm4v-moe": ("Glm4vMoe", {**ROUTED, "head_dim": 16, "rope_parameters": HALF_SECTIONS, "vision_config": TOWER}),
    # A padding token, which transformers puts in place of images; the batch has none.
    "gemma4-vl": (
        "Gemma4",
        {
            **GEMMA4_MOE,
            "pad_token_id": 0,
            "vision_config": {**TOWER, "num_hidden_layers": 1, "head_dim": 8, "position_embedding_size": 8},
        },
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL3_ROPE, "vision_config": PIXTRAL},
    ),
    "kimi-k2.5": ("Kimi_K25", {**DEEPSEEK, "vision_config": KIMI_TOWER, "projection_hidden_size": 16}),
    "cohere2": ("Cohere2", {**WINDOWED, "logit_scale": 0.3, "layer_norm_eps": 0.1}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}),
    "ernie-moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
}
# A critic of every family: a value head on the first of its models.
FIRST = {prefix: name for name, (prefix, _) in reversed(MODELS.items())}
MODELS |= {f"{name}-value": MODELS[name] for name in reversed(FIRST.values())}
MIXTURES = (
    "qwen3-moe",
    "mixtral",
    "deepseek-v3",
    "glm4-moe",
    "glm4-moe-lite",
    "qwen2-moe",
    "gpt-oss",
    "gemma4-moe",
    "gemma4-vl",
    "granitemoe",
    "deepseek-v2",
    "minimax",
    "qwen3-vl-moe",
    "glm4v-moe",
    "kimi-k2.5",
    "ernie-moe",
    "qwen3-next",
    "qwen3.5-moe",
    "qwen3.5-moe-vl",
    "kimi-linear",
    "granite-hybrid-moe",
    "nemotron-h",
    "nemotron-h-latent",
)
# Tensors of a checkpoint that are no parameters.
WITHOUT_GRADIENT = ("e_score_correction_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Place:
    """A grid, what else an actor or a critic is loaded with, and the layers that the model has there."""

    dims: ParallelDims
    options: dict[str, Any] = field(default_factory=dict)
    layers: int = 2


def place(
    *, ring: bool = False, heads: bool = False, vpp: int = 1, zero_bubble: bool = False, layers: int = 2, **sizes: int
) -> Place:
    """One whose data-parallel ranks have several micro-batches."""
    options: dict[str, Any] = {"max_tokens_per_micro_batch": 20}
    if ring or heads:
        options["context_parallel"] = "ring" if ring else "heads"
    if vpp > 1 or zero_bubble:
        options["pipeline"] = PipelineOptions("zero-bubble" if zero_bubble else "1f1b", virtual_stages=vpp)
    return Place(ParallelDims(**sizes), options, layers)


TENSOR_PARALLEL = {
    f"tp{tp}{'-sp' * sp}": Place(ParallelDims(tp=tp), {"sequence_parallel": sp})
    for tp, sp in [(1, False), (2, False), (2, True), (4, False), (4, True)]
}
GRIDS = {
    "dp2": place(dp=2),
    "dp4": place(dp=4),
    "cp2": place(cp=2),
    "cp2-ring": place(cp=2, ring=True),
    "pp2": place(pp=2),
    "pp2-vpp2": place(pp=2, vpp=2, layers=4),
    "pp4": place(pp=4, layers=4),
    "dp2-tp2": place(dp=2, tp=2),
    "dp2-cp2": place(dp=2, cp=2),
    "cp2-tp2": place(cp=2, tp=2),
    "cp2-tp2-ring": place(cp=2, tp=2, ring=True),
    "pp2-tp2": place(pp=2, tp=2, zero_bubble=True),
    "pp2-dp2": place(pp=2, dp=2),
    "pp2-cp2": place(pp=2, cp=2),
}
EXPERT_GRIDS = {
    "tp2-ep2": place(tp=2, ep=2),
    "dp2-ep2": place(dp=2, ep=2),
    "cp2-ep2": place(cp=2, ep=2),
    "dp2-tp2-ep2": place(dp=2, tp=2, ep=2),
    "dp2-tp2-ep4": place(dp=2, tp=2, ep=4),
    "dp2-cp2-ep4": place(dp=2, cp=2, ep=4),
    "pp2-tp2-ep2": place(pp=2, tp=2, ep=2, zero_bubble=True),
    "pp2-cp2-ep2": place(pp=2, cp=2, ep=2, ring=True),
    "pp2-dp2-ep2": place(pp=2, dp=2, ep=2),
}
# Forms of recurrent layers.
HYBRID_GRIDS = {
    "cp2-tp2-heads": place(cp=2, tp=2, heads=True),
    "cp4": place(cp=4),
    "cp4-ring": place(cp=4, ring=True),
}
HYBRIDS = ("qwen3-next", "olmo-hybrid", "kimi-linear", "granite-hybrid", "nemotron-h")
PLACES = {**TENSOR_PARALLEL, **GRIDS, **EXPERT_GRIDS, **HYBRID_GRIDS}
ACTORS = [name for name in MODELS if not name.endswith("-value")]
# Left out of a plain run at tp 2: other cases of it have these layers.
LEFT_OUT = {
    # Text alone of models that see: the decoder is that of another case.
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl-moe", "glm4v-moe", "gemma4-vl", "mistral3", "kimi-k2.5"),
    *("qwen3.5-vl", "qwen3.5-moe-vl"),
    # On another grid below.
    *("qwen2", "qwen2-window-tied", "qwen3", "deepseek-v3", "gemma4-e2b"),
    # Biases are seed-oss's; values of their own are gemma4-e2b's; dense layers of Gemma 4, too.
    *("llama-biases", "gemma4-own-values", "gemma4"),
    # Its layers are those of phi3-longrope.
    "phi3",
}
# Every other actor at tp 2, with sequence parallelism or without, and every other axis once.
PLAIN = {
    *((name, ("tp2-sp", "tp2")[number % 2]) for number, name in enumerate(ACTORS) if name not in LEFT_OUT),
    ("llama", "tp1"),
    ("qwen2", "tp4-sp"),
    ("llama-value", "cp2-ring"),
    ("qwen2-window-tied", "cp2"),
    ("qwen2-value", "dp2"),
    ("qwen3-value", "pp2"),
    ("granitemoe-value", "dp2-ep2"),
    ("deepseek-v3", "pp2-tp2-ep2"),
    ("gemma4-e2b", "pp2-tp2"),
    ("kimi-linear", "cp2-tp2-heads"),
}
# An actor and a critic of a family have one decoder, and the value head does not depend on the family: two critics are
# on every grid, the others on one of each axis.
ON_EVERY_GRID = {*ACTORS, "llama-value", "qwen3-moe-value"}
OF_CRITICS = ("tp1", "tp2-sp", "tp4-sp", "pp2", "cp2", "dp2-ep2")
CASES = [
    pytest.param(name, grid, marks=() if (name, grid) in PLAIN else pytest.mark.slow, id=f"{name}-{grid}")
    for name in MODELS
    for grid in PLACES
    if grid not in EXPERT_GRIDS or name.removesuffix("-value") in MIXTURES
    if grid not in HYBRID_GRIDS or name in HYBRIDS
    if name in ON_EVERY_GRID or (name, grid) in PLAIN or grid in OF_CRITICS
]


@dataclass(frozen=True)
class Expected:
    """A checkpoint, transformers' results `[T]` of it, and its gradients."""

    path: Path
    results: list[Tensor]
    gradients: dict[str, Tensor]


class References:
    """What transformers makes of the batch, of each model with each number of layers: computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[tuple[str, int], Expected] = {}

    def __call__(self, name: str, layers: int) -> Expected:
        if (name, layers) not in self.found:
            folder = self.folder / f"{name}-{layers}"
            model = checkpoint(folder / "model", name, layers)
            results, gradients = reference(model, make_batch(), folder / "gradients")
            self.found[name, layers] = Expected(folder / "model", results, canonical(gradients, folder / "model"))
        return self.found[name, layers]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("models"))


def checkpoint(path: Path, name: str, layers: int) -> PreTrainedModel:
    """The model, which is also saved; no parameter is 0 or 1, as the biases and norms of a new model are."""
    # A seed that leaves no expert without tokens.
    torch.manual_seed(sum(map(ord, name)) + 10 * (layers - 2))
    prefix, changes = MODELS[name]
    if "num_kv_shared_layers" in changes:
        layers = 4  # for each kind of attention a layer that stores and one that reuses
    if "layer_types" in changes:
        changes = {**changes, "layer_types": changes["layer_types"] * (layers // 2)}
    fields = {**SIZES, "num_labels": 1, **changes, "num_hidden_layers": layers}
    # transformers has no class with a value head for some families.
    value = name.endswith("-value")
    own = value and "vision_config" not in fields and hasattr(transformers, f"{prefix}ForTokenClassification")
    kind = "ForTokenClassification" if own else "ForCausalLM"
    if "vision_config" in fields:
        outer = {key: fields.pop(key) for key in ("vision_config", "projection_hidden_size") if key in fields}
        fields, kind = {**outer, "text_config": fields}, "ForConditionalGeneration"
    config = getattr(transformers, f"{prefix}Config")(**fields)
    # sdpa has no soft-caps and no sinks.
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, prefix.removesuffix("Text") + kind)(config).eval()
    if value and not own:
        model.score = torch.nn.Linear(config.get_text_config().hidden_size, 1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 0.15 * noise)
            if prefix.startswith(("Qwen3Next", "Qwen3_5")) and parameter_name.endswith("norm.weight"):
                parameter.sub_(0 if "linear_attn" in parameter_name else 1)  # weights that are differences from one
            if prefix.startswith("Gemma4") and parameter_name.endswith("q_norm.weight"):
                parameter.mul_(0.3)  # in place of a scale of the scores
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    model.save_pretrained(path)
    return model


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    weights = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in ("a", "b")}
    return Batch.from_sequences(rows, **weights)


def reference(model: PreTrainedModel, batch: Batch, folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """transformers, one sequence at a time: results `[T]` aligned with their own token, and gradients.

    These go through a checkpoint in `folder`, since transformers' parameters need not be the tensors of its files.
    """
    columns: list[list[Tensor]] = []
    for tokens in batch.split():
        if hasattr(model, "score"):
            output = model.score(model.model(input_ids=tokens[None]).last_hidden_state)[0].double()
            columns.append([torch.cat([output.new_zeros(1), output[:-1, 0]])])
            continue
        output = model(tokens[None]).logits[0].double()
        predicted = (output / TEMPERATURE).log_softmax(-1)
        log_probs = predicted[:-1].gather(-1, tokens[1:, None])[:, 0]
        entropy = -(predicted.exp() * predicted).sum(-1)[:-1]
        columns.append([torch.cat([output.new_zeros(1), column]) for column in (log_probs, entropy)])
    results = [torch.cat(column) for column in zip(*columns, strict=True)]
    weighted = zip(results, (batch["a"], batch["b"]), strict=False)
    (torch.stack([(result * weight).sum() for result, weight in weighted]).sum() / batch.mask.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    gradients = load_file(folder / "model.safetensors")
    if hasattr(model, "score"):
        gradients.pop("lm_head.weight", None)
    return [result.detach() for result in results], gradients


def actor_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs * inputs["a"] + inputs.entropy * inputs["b"])


def critic_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.values * inputs["a"])


@cache
def mesh_of(dims: ParallelDims) -> DeviceMesh:
    """The mesh of a grid on the first ranks, formed once by each rank."""
    return dims.build_mesh("cpu", list(range(dims.world_size)))


def run_native(
    group: ProcessGroup, path: Path, value: bool, place: Place
) -> tuple[list[int], list[Tensor], dict[str, Tensor]]:
    """The sequences of this data-parallel rank, their results `[T]`, and on the first rank every gradient."""
    dims = place.dims
    kind: type[Worker] = Critic if value else Actor
    worker: Any = kind.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu", **place.options)
    batch = make_batch()
    indices = list(range(worker.grid.rank("dp"), len(batch), dims.dp))
    part = batch.select(indices)
    results = [worker.values(part)] if value else list(worker.log_probs(part, temperature=TEMPERATURE))
    loss, tokens = (critic_loss if value else actor_loss), worker.max_tokens_per_micro_batch
    accumulate(worker.engine, part, loss, tokens, call="update", aggregation="token-mean", temperature=TEMPERATURE)
    shards = worker.engine.shards()
    local = [
        {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in chunk.items()}
        for _, chunk in shards.chunks
    ]
    streamed = ckpt.stream_hf(local, shards.layout, worker.grid.everyone, shards.places, to=[0])
    return indices, results, {name: tensor.detach() for name, tensor in streamed}


@pytest.mark.families("name")
@pytest.mark.parity("parallel")
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_native_models_equal_transformers(ranks: RankPool, references: References, name: str, grid: str) -> None:
    place = PLACES[grid]
    expected = references(name, place.layers)
    batch = make_batch()
    arguments = expected.path, name.endswith("-value"), place
    per_rank = ranks.run(run_native, *arguments, world=place.dims.world_size, timeout=120)
    of_first: dict[int, list[Tensor]] = {}
    for indices, results, _ in per_rank:
        for actual, wanted in zip(results, expected.results, strict=True):
            where = batch.positions(indices)
            torch.testing.assert_close(actual.double(), wanted[where].double(), rtol=0, atol=1e-5)
        # Ranks of one data-parallel rank have the same numbers.
        first = of_first.setdefault(indices[0], results)
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))
    assert len(of_first) == place.dims.dp
    gradients = per_rank[0][2]
    assert gradients.keys() == expected.gradients.keys()
    for parameter, wanted in expected.gradients.items():
        if parameter.endswith(WITHOUT_GRADIENT):
            continue
        if gradients[parameter].shape != wanted.shape:  # transformers saves Qwen3-VL-MoE's experts the other way round
            wanted = wanted.transpose(1, 2)
        # The gradient of an expert without tokens is zero.
        difference = (gradients[parameter] - wanted).norm() / (wanted.norm() if wanted.any() else 1)
        # xIELU's are sums over all tokens and channels, most of which cancels.
        limit = 1e-4 if "act_fn.alpha" in parameter else 1e-5
        assert difference <= limit, f"{parameter}: relative difference {difference:.2e}"
        torch.testing.assert_close(
            gradients[parameter],
            wanted,
            rtol=1e-4,
            atol=1e-5 * float(wanted.abs().max()),
            msg=lambda text, at=parameter: f"{at}: {text}",
        )
