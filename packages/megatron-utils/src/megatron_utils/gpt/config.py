"""From a Hugging Face config to Megatron-Core's `TransformerConfig`: one table of families.

Every family shares the plain decoder's fields; what it adds or does otherwise is a row of `FAMILIES`. A field that
would change the computation and that Megatron cannot express is refused by name; one that is missing is needed, or what
transformers' own config of the family has then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from parallel_layers import ParallelDims

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """What one `model_type` adds to the plain decoder."""

    qk_norm: bool = False
    qkv_bias: Callable[[HfConfig], bool] = lambda hf: bool(hf.get("attention_bias", False))
    output_bias: Callable[[HfConfig], bool] = lambda hf: False
    mlp_bias: Callable[[HfConfig], bool] = lambda hf: False
    window: Callable[[HfConfig], int | None] = lambda hf: None
    """Tokens of the sliding window, the query's own included."""
    slides: Callable[[HfConfig], list[bool]] = lambda hf: [True] * hf["num_hidden_layers"]
    """Whether each layer has the window."""
    latent: Callable[[HfConfig], dict[str, Any]] | None = None
    """Fields of multi-head latent attention, for families that have it."""
    moe: Callable[[HfConfig], dict[str, Any]] | None = None
    rope_theta: float = 10000.0
    """Where the config states none."""


class _Fields(dict[str, Any]):
    """A config's fields; one that is needed and missing is a ValueError."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"the config has no {name}; add it as transformers writes it")


def hf_config(config: Any) -> dict[str, Any]:
    """A Hugging Face config's fields: from a mapping, an object with `.to_dict()`, or a checkpoint folder.

    Raises:
        ValueError: it is none of these; later, when a field is read that is missing.
    """
    if isinstance(config, Mapping):
        return _Fields(config)
    if isinstance(config, str | Path):
        return _Fields(json.loads((Path(config) / "config.json").read_text()))
    if hasattr(config, "to_dict"):
        return _Fields(config.to_dict())
    raise ValueError(
        f"config must be a mapping, have .to_dict(), or be a checkpoint folder; got {type(config).__name__}"
    )


def _qwen_window(hf: HfConfig) -> int | None:
    return hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None


def _qwen_slides(hf: HfConfig) -> list[bool]:
    """By `layer_types`, or, as transformers fills them in, from layer `max_window_layers` on."""
    first = hf.get("max_window_layers", 28)
    if types := hf.get("layer_types"):
        return [kind == "sliding_attention" for kind in types]
    return [layer >= first for layer in range(hf["num_hidden_layers"])]


def _softmax_experts(hf: HfConfig) -> dict[str, Any]:
    """Mixture fields shared by the families that route by a softmax. transformers has two names for the count."""
    return {
        "num_moe_experts": hf.get("num_experts") or hf["num_local_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size") or hf["intermediate_size"],
        # softmax over the chosen equals softmax over all, renormalised.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", hf["model_type"] == "mixtral"),
        "moe_layer_freq": _moe_layers(hf),
    }


def _moe_layers(hf: HfConfig) -> list[int]:
    """1 for each layer that is a mixture, 0 for a dense one."""
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or []
    return [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]


def _latent_attention(hf: HfConfig) -> dict[str, Any]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): sizes, and the factor of yarn in the scale."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if not hf.get("rope_interleave", True):
        raise ValueError(
            "rope_interleave=False is not supported with latent attention: it rotates neighbouring dims, as DeepSeek's "
            "checkpoints want it"
        )
    return {
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        # The rotation itself is `LatentAttention`'s; of Megatron's own remains (0.1 mscale log(factor) + 1)^2.
        "rope_type": "rope",
        "rotary_scaling_factor": rope.get("factor", 1.0) if scaled else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _sigmoid_experts(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3's mixture (arXiv:2412.19437): sigmoid scores, a bias that only chooses, groups, shared experts."""
    layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace") or 0
    top_k, groups, top_groups = hf["num_experts_per_tok"], hf.get("n_group", 8) or 1, hf.get("topk_group", 4) or 1
    if groups > 1 and top_k != 2 * top_groups:
        raise ValueError(
            f"num_experts_per_tok={top_k} with topk_group={top_groups} is not supported: Megatron ranks a group by the "
            f"sum of its num_experts_per_tok // topk_group best scores, transformers by the sum of its two best"
        )
    if top_k == 1 or not hf.get("norm_topk_prob", True):
        raise ValueError(
            f"num_experts_per_tok={top_k} with norm_topk_prob={hf.get('norm_topk_prob')} is not supported: Megatron "
            "divides sigmoid scores by their sum exactly where there are several; use several and norm_topk_prob=True"
        )
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0) or None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # The bias is part of the checkpoint; fine-tuning leaves it alone unless told otherwise.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 2.5),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": top_groups if groups > 1 else None,
    }


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(latent=_latent_attention, moe=_sigmoid_experts),
    "llama": Family(
        output_bias=lambda hf: bool(hf.get("attention_bias", False)),
        mlp_bias=lambda hf: bool(hf.get("mlp_bias", False)),
    ),
    "mistral": Family(window=lambda hf: hf.get("sliding_window", 4096)),
    "qwen2": Family(qkv_bias=lambda hf: True, window=_qwen_window, slides=_qwen_slides),
    "qwen3": Family(
        qk_norm=True,
        output_bias=lambda hf: bool(hf.get("attention_bias", False)),
        window=_qwen_window,
        slides=_qwen_slides,
    ),
    "qwen3_moe": Family(
        qk_norm=True,
        output_bias=lambda hf: bool(hf.get("attention_bias", False)),
        window=_qwen_window,
        moe=_softmax_experts,
    ),
    "mixtral": Family(window=lambda hf: hf.get("sliding_window"), moe=_softmax_experts, rope_theta=1e6),
}


def family_of(hf: HfConfig) -> Family:
    """The family of a config.

    Raises:
        ValueError: it is not in the table.
    """
    name = hf.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type={name!r} is not supported on Megatron-Core; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def head_dim(hf: HfConfig) -> int:
    """D, explicit or hidden_size / num_attention_heads; of latent attention the part that is rotated."""
    if family_of(hf).latent is not None:
        return int(hf["qk_rope_head_dim"])
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def transformer_config(
    config: Any,
    dims: ParallelDims,
    *,
    dtype: torch.dtype = torch.float32,
    virtual_stages: int | None = None,
    expert_tp: int | None = None,
    sequence_parallel: bool | None = None,
    layers_per_stage: list[int] | None = None,
    **options: Any,
) -> TransformerConfig:
    """Megatron's config for a Hugging Face config on a grid.

    Args:
        config: a mapping, an object with `.to_dict()`, or a checkpoint folder.
        dims: the grid.
        dtype: of the parameters and of what stages send each other.
        virtual_stages: model chunks a rank holds under the interleaved schedule.
        expert_tp: tensor parallelism inside an expert (`MegatronGrid.expert_tp`).
        sequence_parallel: default: with tp > 1.
        layers_per_stage: layers of each of the `pp * virtual_stages` chunks in order of depth; default equal parts.
        options: any further field of `TransformerConfig` (recompute, offload, ...). `cp_comm_type` is "p2p" (ring
            attention, the default where no layer has a window) or "a2a" (Ulysses).

    Raises:
        ValueError: an unknown family or option, a field that Megatron cannot express, or sizes that do not divide:
            with the values and the fix.
    """
    hf = hf_config(config)
    family = family_of(hf)
    _check(hf, dims, (virtual_stages or 1) * dims.pp, layers_per_stage)
    kind = TransformerConfig if family.latent is None else MLATransformerConfig
    if unknown := sorted(options.keys() - kind.__dataclass_fields__.keys()):
        raise ValueError(f"{kind.__name__} of this megatron-core has no field {', '.join(unknown)}")
    if given := sorted(options.keys() & _OF_THE_GRID):
        raise ValueError(f"{', '.join(given)}: this follows from the grid; leave it out")
    heads = hf["num_attention_heads"]
    slides = family.slides(hf)
    window = family.window(hf) if any(slides) else None
    fields: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias(hf),
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "context_parallel_size": dims.cp,
        "cp_comm_type": "a2a" if window else "p2p",
        "expert_model_parallel_size": dims.ep,
        "sequence_parallel": dims.tp > 1 if sequence_parallel is None else sequence_parallel,
        # Packed micro-batches differ in length; for interleaving `run_schedule` evens them out, and says why.
        "variable_seq_lengths": dims.pp > 1 and virtual_stages is None,
        # Interleaving with batched sends gives wrong gradients, silently.
        "batch_p2p_comm": virtual_stages is None,
        # The only dispatcher that takes them, which even a dense model must name.
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": True,
        # Weights come from a checkpoint.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }
    if layers_per_stage is not None:
        fields["pipeline_model_parallel_layout"] = _layout(layers_per_stage)
    if family.latent is not None:
        # Every head has keys and values of its own, whatever num_key_value_heads says.
        fields |= {"num_query_groups": heads, "kv_channels": hf["v_head_dim"], **family.latent(hf)}
    if window:
        fields |= {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(each) for each in slides]}
    if family.moe is not None:
        fields |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": expert_tp or dims.tp,
            **family.moe(hf),
        }
        _check_experts(hf, fields, dims)
    elif dims.ep > 1:
        raise ValueError(f"ep={dims.ep} is for a mixture of experts, which {hf['model_type']} is not; leave it out")
    if sequence_parallel and dims.tp == 1:
        raise ValueError("sequence_parallel=True needs tp > 1; leave it out")
    fields |= options
    if virtual_stages is not None and fields["batch_p2p_comm"]:
        raise ValueError(
            f"batch_p2p_comm=True with virtual_stages={virtual_stages} gives wrong gradients; leave it False"
        )
    if fields["cp_comm_type"] not in ("p2p", "a2a"):
        raise ValueError(f"cp_comm_type={fields['cp_comm_type']!r} must be 'p2p' (ring attention) or 'a2a' (Ulysses)")
    if dims.cp > 1 and fields["cp_comm_type"] == "p2p" and window:
        raise ValueError(f"cp_comm_type='p2p' has no sliding_window={window}; use cp_comm_type='a2a'")
    return kind(**fields)


# Contradicted, they compute something else or wait for ever, without an error.
_OF_THE_GRID = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "variable_seq_lengths",
}


def _layout(layers_per_stage: list[int]) -> list[list[str]]:
    layout = [["decoder"] * count for count in layers_per_stage]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def _check(hf: HfConfig, dims: ParallelDims, chunks: int, layers_per_stage: list[int] | None) -> None:
    layers = hf["num_hidden_layers"]
    if family_of(hf).latent is not None and hf.get("attention_bias"):
        raise ValueError("attention_bias=True is not supported with latent attention; known checkpoints have none")
    if misfit := _tp_misfit(hf, dims.tp):
        raise ValueError(f"{misfit}; use tp in {_fitting_tp(hf)}")
    if layers < chunks:
        raise ValueError(
            f"num_hidden_layers={layers} is fewer than pp * virtual_stages = {chunks}; every chunk needs a layer: use "
            f"pp * virtual_stages up to {layers}"
        )
    if layers_per_stage is None and layers % chunks:
        raise ValueError(
            f"num_hidden_layers={layers} does not divide into {chunks} pipeline chunks; "
            f"pass layers_per_stage, for instance {[layers // chunks + (i < layers % chunks) for i in range(chunks)]}"
        )
    if layers_per_stage is not None and (
        len(layers_per_stage) != chunks or sum(layers_per_stage) != layers or min(layers_per_stage) < 1
    ):
        raise ValueError(f"layers_per_stage={layers_per_stage} must be {chunks} numbers above 0 that sum to {layers}")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported; these families use 'silu'")
    if hf.get("mlp_bias") and not family_of(hf).mlp_bias(hf):
        raise ValueError(f"mlp_bias=True is not known of model_type={hf['model_type']!r}; leave it out")


def _fitting_tp(hf: HfConfig) -> list[int]:
    return [n for n in range(1, hf["num_attention_heads"] + 1) if not _tp_misfit(hf, n)]


def _tp_misfit(hf: HfConfig, tp: int) -> str:
    """The first size that does not divide over `tp` ranks, empty where all do."""
    for name in ("num_attention_heads", "intermediate_size"):
        if hf[name] % tp:
            return f"{name}={hf[name]} is not divisible by tp={tp}"
    groups = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    if family_of(hf).latent is None and groups % tp and tp % groups:
        return f"num_key_value_heads={groups} and tp={tp}: one must divide the other"
    return ""


def _check_experts(hf: HfConfig, fields: dict[str, Any], dims: ParallelDims) -> None:
    experts, top_k, width = fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_ffn_hidden_size"]
    expert_tp = fields["expert_tensor_parallel_size"]
    if experts % dims.ep:
        fits = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ValueError(f"{experts} experts do not divide over ep={dims.ep}; use ep in {fits}")
    if width % expert_tp:
        fits = [n for n in _fitting_tp(hf) if width % n == 0]
        raise ValueError(
            f"experts {width} wide do not divide over expert_tp={expert_tp}; use expert_tp=1, or tp in {fits}"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(f"num_experts_per_tok={top_k} is not in 1..{experts}, the number of experts")
