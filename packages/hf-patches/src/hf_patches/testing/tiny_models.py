"""Tiny random models of every family, and reference numbers of unpatched transformers.

Programs that patch models can compare their own batches with `one_by_one`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_patches.families import vision_of

# Small enough for a CPU, large enough that heads, groups and layers of two kinds exist.
_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
_ROUTED |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# With as many groups as experts for a token, Megatron-Core, too, ranks a group by its best expert.
_GREEDY_GROUPS = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 1}
_MLA = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_MLA |= {"num_key_value_heads": 4}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}

_MINISTRAL3 = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4},
        "llama_4_scaling_beta": 0.5,
    },
    "head_dim": 8,
}
_GEMMA4 = _ALTERNATING | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_GEMMA4 |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
_GEMMA4 |= {"hidden_size_per_layer_input": 0}

_RECURRENT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8, "full_attention_interval": 2}
_DELTA_NET |= {"linear_key_head_dim": 12, "linear_value_head_dim": 16}
_KIMI_LINEAR = _MLA | _MOE | _RECURRENT | {"q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4}
_KIMI_LINEAR |= {"mlp_layer_types": ["dense", "sparse"], "n_group": 2}

_NEMOTRON: dict[str, Any] = {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "head_dim": 8}
_NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "n_routed_experts": 4}
_NEMOTRON |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 12}
_NEMOTRON |= {"n_group": 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "position_embedding_type": "rope"}

_TOKENS = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 0, "vision_end_token_id": 0}
_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2}
_TOWER |= {"spatial_merge_size": 2}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_HALF_SECTIONS = {"rope_parameters": {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5}}
_GLM_TOWER: dict[str, Any] = _TOWER | {"hidden_size": 16, "intermediate_size": 24, "image_size": 8}
_QWEN3_TOWER: dict[str, Any] = _TOWER | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
_QWEN3_5_TOWER = _QWEN3_TOWER | {"num_position_embeddings": 16}
_QWEN3_TOWER = _QWEN3_5_TOWER | {"deepstack_visual_indexes": [0, 1]}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere2": _ALTERNATING | {"logit_scale": 0.3},
    "deepseek_v2": _MLA | _ROUTED | _GREEDY_GROUPS,
    "deepseek_v3": _MLA | _ROUTED,
    "gemma2": _ALTERNATING | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": _ALTERNATING,
    "gemma4_text": _GEMMA4,
    "glm4": {"head_dim": 8},
    "glm4_moe": _ROUTED | {"head_dim": 8},
    "glm4_moe_lite": _MLA | _ROUTED,
    "gpt_oss": _ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": _ALTERNATING,
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0, "residual_multiplier": 0.8},
    "granitemoehybrid": _RECURRENT
    | _MAMBA
    | {"num_local_experts": 4, "shared_intermediate_size": 24, "logits_scaling": 3.0, "residual_multiplier": 0.8},
    "kimi_linear": _KIMI_LINEAR,
    "llama": {},
    "nemotron_h": _NEMOTRON,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ministral3": _MINISTRAL3,
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "olmo2": {},
    "olmo_hybrid": _RECURRENT | _DELTA_NET,
    "olmo3": _ALTERNATING,
    "phi3": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 24},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 8},
    "qwen3_moe": _MOE | {"head_dim": 8},
    "qwen3_5_moe_text": _DELTA_NET | _MOE | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET | _MOE | {"shared_expert_intermediate_size": 24},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    # Outside the table of families.
    "cohere": {"logit_scale": 0.3},
    "cohere2_moe": _ALTERNATING | _MOE,
    "falcon": {},
    "bert": {"is_decoder": True},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "ministral": _ALTERNATING,
    "nanochat": {},
    "olmo": {},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "phi": {},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": _ALTERNATING | {"final_logit_softcapping": 4.0},
    # With images: the text config, and below the tower's.
    "gemma4": _GEMMA4 | {"pad_token_id": 0},  # transformers puts it in place of images
    "glm4v": _HALF_SECTIONS | {"hidden_size": 64},
    "glm4v_moe": _HALF_SECTIONS | _ROUTED | {"head_dim": 16},
    "kimi_k25": _MLA | _ROUTED,
    "mistral3": _MINISTRAL3 | {"model_type": "ministral3"},
    "qwen2_5_vl": _SECTIONS,
    "qwen2_vl": _SECTIONS,
    "qwen3_5": _HALF_SECTIONS | _DELTA_NET | {"head_dim": 16},
    "qwen3_5_moe": _HALF_SECTIONS | _DELTA_NET | _MOE | {"head_dim": 16, "shared_expert_intermediate_size": 24},
    "qwen3_vl": _SECTIONS | {"head_dim": 8},
    "qwen3_vl_moe": _SECTIONS | _MOE | {"head_dim": 8, "moe_intermediate_size": 24},
}

_TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": {
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8},
    },
    "glm4v": _GLM_TOWER | {"out_hidden_size": 64},
    "glm4v_moe": _GLM_TOWER | {"out_hidden_size": 32},
    "kimi_k25": {
        **{"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 2},
        **{"hidden_size": 16, "intermediate_size": 24},
    },
    "mistral3": {
        **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 8, "patch_size": 2},
    },
    "qwen2_5_vl": _TOWER
    | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
    | {"window_size": 8, "fullatt_block_indexes": [1]},
    "qwen2_vl": _TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen3_5": _QWEN3_5_TOWER,
    "qwen3_5_moe": _QWEN3_5_TOWER,
    "qwen3_vl": _QWEN3_TOWER,
    "qwen3_vl_moe": _QWEN3_TOWER,
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Return a config of a family with two layers and a few heads; overrides go to the text config."""
    text = _SIZES | _OVERRIDES[model_type] | overrides
    if model_type not in _TOWERS:
        return AutoConfig.for_model(model_type, **text)
    # transformers reads Gemma 4's placeholders as padding, so they stay outside of the vocabulary.
    tokens = {} if model_type == "gemma4" else _TOKENS
    return AutoConfig.for_model(
        model_type, text_config=text, vision_config=_TOWERS[model_type], projection_hidden_size=16, **tokens
    )


def tiny_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a language model of a family that depends on the seed only: eager attention, fp32, in training mode.

    The weights are larger than transformers' own initialisation makes them, so that attention and norms matter.
    """
    config = tiny_config(model_type, **overrides)
    auto = AutoModelForImageTextToText if model_type in _TOWERS else AutoModelForCausalLM
    with torch.random.fork_rng(devices=()):  # vectors keep part of what transformers draws
        torch.default_generator.manual_seed(seed)
        model = auto.from_config(config, attn_implementation="eager")
    return randomize(model, seed).train()


def randomize(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw every parameter again: matrices with deviation 0.2, vectors near their old values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model


def random_sequences(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Tensor]:
    """Return one tensor of random ids for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


@dataclass(frozen=True)
class Sample:
    """A sequence with images or videos: its ids and its other inputs, as transformers takes a single sequence."""

    ids: Tensor
    inputs: dict[str, Tensor]


def random_sample(model: PreTrainedModel, parts: Sequence[int | tuple[int, int, int]], seed: int = 0) -> Sample:
    """Return a sequence made of texts of given lengths and of image grids (frames, rows, columns), in order."""
    generator = torch.Generator().manual_seed(seed)
    vision = vision_of(model.config)
    assert vision is not None
    height, width = vision.merge(model.config.vision_config)
    ids, pixels, grids = [], [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(3, model.config.get_text_config().vocab_size, (part,), generator=generator))
            continue
        patches = part[0] * part[1] * part[2]
        ids.append(torch.full((patches // (height * width),), model.config.image_token_id))
        shape = vision.patch_shape(model.config.vision_config)
        pixels.append(torch.randn(patches, *shape, generator=generator))
        grids.append(part)
    joined = torch.cat(ids)
    if not grids:
        return Sample(joined, {})
    return Sample(joined, {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)})


def join_inputs(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Join the other inputs of all samples for one packed call."""
    names = dict.fromkeys(name for sample in samples for name in sample.inputs)
    return {name: torch.cat([s.inputs[name] for s in samples if name in s.inputs]) for name in names}


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of the next tokens (0 at the end of each sequence) and entropies, `[T]` fp32 over all sequences."""

    log_probs: Tensor
    entropy: Tensor


def one_by_one(model: PreTrainedModel, sequences: Sequence[Tensor | Sample], temperature: float = 1.0) -> TokenScores:
    """Score each sequence alone with an unpatched model, from its logits."""
    log_probs, entropies = [], []
    for sequence in sequences:
        sample = sequence if isinstance(sequence, Sample) else Sample(sequence, {})
        inputs, ids = dict(sample.inputs), sample.ids
        if inputs and "mrope_section" in str(model.config.get_text_config()):
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int().unsqueeze(0)
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False, **inputs).logits[0].float() / temperature
        distribution = logits.log_softmax(dim=-1)
        next_tokens = distribution[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        log_probs.append(torch.cat([next_tokens, next_tokens.new_zeros(1)]))
        entropies.append(-(distribution.exp() * distribution).sum(dim=-1))
    return TokenScores(torch.cat(log_probs), torch.cat(entropies))
