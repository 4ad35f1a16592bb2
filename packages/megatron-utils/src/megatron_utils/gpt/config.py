"""Megatron-Core's `TransformerConfig` from the description of a model.

`parallel_layers.ModelConfig` reads the Hugging Face config. A part of the description that Megatron-Core cannot express
is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from parallel_layers import ModelConfig, ParallelDims
from parallel_layers.attention import LatentConfig
from parallel_layers.device import GPU, gpu
from parallel_layers.mlp import ACTIVATIONS, activation_function
from parallel_layers.model import FAMILIES as DESCRIBED, read
from parallel_layers.moe import MoEConfig

# Fields of a `DecoderConfig` and a `MoEConfig` with the values that Megatron-Core can express; others with any value.
_VALUES: dict[str, tuple[Any, ...]] = {
    "activation": tuple(ACTIVATIONS),
    "normalization": ("rms",),
    "norm_placement": ("pre", "post", "sandwich"),
    "context_parallel": ("ulysses",),
    "value_norm": (False,),
    "output_scale": (False,),
    "output_gate": (False,),
}


def parameter_device(config: TransformerConfig) -> str | None:
    """Return the device on which layers make their parameters; None: the CPU."""
    return None if config.use_cpu_initialization else GPU


def is_stacked(moe: MoEConfig | Mapping[str, Any]) -> bool:
    """Say whether experts are `StackedExperts`: Megatron-Core has no experts of this form."""
    fields = moe if isinstance(moe, Mapping) else vars(moe)
    return bool(fields.get("input_major_experts") or fields.get("expert_bias"))


def _inexpressible(decoder: Mapping[str, Any], moe: Mapping[str, Any] | None) -> list[str]:
    """Return the fields of a description that Megatron-Core cannot express, with the values that it can."""
    misfits = [
        f"{name}={fields[name]!r} (Megatron-Core: {' or '.join(map(repr, values))})"
        for fields in (decoder, {} if moe is None or is_stacked(moe) else moe)
        for name, values in _VALUES.items()
        if name in fields and fields[name] not in values
    ]
    if moe is not None and moe.get("correction_bias") and moe.get("scoring", "softmax") == "softmax":
        misfits.append("a correction bias of softmax scores (Megatron-Core: of sigmoid scores)")
    return misfits


def _by_default(entries: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the default values of a row's entries, without entries that a config must give."""
    if entries is None:
        return None
    defaults = {}
    for name, value in entries.items():
        with contextlib.suppress(ValueError):
            defaults[name] = read(value, {})
    return defaults


FAMILIES = tuple(
    name
    for name, family in sorted(DESCRIBED.items())
    if family.linear is None and not _inexpressible(_by_default(family.decoder) or {}, _by_default(family.moe))
)
"""The `model_type`s that Megatron-Core can express; of a vision-language model the text part, on text alone."""


def _latent_attention(latent: LatentConfig) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    return {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "kv_channels": latent.v_head_dim,
        # `LatentAttention` rotates, and `PackedCoreAttention` has the scale.
        "rope_type": "rope",
    }


def _experts(moe: MoEConfig) -> dict[str, Any]:
    """Return the fields of routed and shared experts."""
    best = {"top2": 2, "max": 1}[moe.group_score]
    if moe.num_groups > 1 and moe.top_k != best * moe.top_k_groups:
        raise ValueError(
            f"num_experts_per_tok={moe.top_k} with topk_group={moe.top_k_groups} is not supported: Megatron ranks a "
            f"group by the sum of its num_experts_per_tok // topk_group best scores, transformers by its {best} best"
        )
    if moe.scoring == "softmax" and moe.normalize_top_k and moe.top_k == 1:
        raise ValueError(
            "num_experts_per_tok=1 with norm_topk_prob=True is not supported: Megatron-Core multiplies the output of a "
            "single expert by its probability, which the model divides by itself; use several experts"
        )
    if moe.scoring == "sigmoid" and (moe.top_k == 1 or not moe.normalize_top_k):
        raise ValueError(
            f"num_experts_per_tok={moe.top_k} with norm_topk_prob={moe.normalize_top_k} is not supported: Megatron "
            "divides sigmoid scores by their sum exactly where there are several; use several and norm_topk_prob=True"
        )
    return {
        "moe_router_score_function": moe.scoring,
        # Softmax over the chosen equals softmax over all, renormalised.
        "moe_router_pre_softmax": moe.scoring == "softmax" and not moe.normalize_top_k,
        "moe_router_enable_expert_bias": moe.correction_bias,
        # The bias is part of the checkpoint; fine-tuning leaves it alone unless told otherwise.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": None if moe.routed_scaling_factor == 1 else moe.routed_scaling_factor,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.top_k_groups if moe.num_groups > 1 else None,
        "moe_shared_expert_intermediate_size": moe.shared_intermediate_size or None,
        "moe_shared_expert_gate": moe.shared_expert_gate,
    }


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
    """Return Megatron's config of a model on a grid.

    Args:
        config: The input of `ModelConfig.from_hf`: a mapping, an object with `.to_dict()`, or a checkpoint folder.
        dims: The grid.
        dtype: The dtype of the parameters, and of the tensors that stages send each other.
        virtual_stages: The number of chunks per rank under the interleaved schedule.
        expert_tp: Tensor parallelism inside an expert (`MegatronGrid.expert_tp`).
        sequence_parallel: Keep `[T/tp, 1, H]` between blocks; None: if tp > 1.
        layers_per_stage: The layers of each of the `pp * virtual_stages` chunks; None: equal parts.
        options: Further fields of `TransformerConfig`. `cp_comm_type` is "p2p" (ring attention, the default without
            windows) or "a2a" (Ulysses).

    Raises:
        ValueError: The family or an option is unknown, Megatron cannot express a field, or sizes do not divide; names
            the values and the fix.
    """
    model = ModelConfig.from_hf(config)
    decoder, experts = model.decoder, next(filter(None, model.moe), None)
    _check(model, dims, (virtual_stages or 1) * dims.pp, layers_per_stage)
    kind = TransformerConfig if decoder.latent is None else MLATransformerConfig
    if unknown := sorted(options.keys() - kind.__dataclass_fields__.keys()):
        raise ValueError(f"{kind.__name__} of this megatron-core has no field {', '.join(unknown)}")
    if decided := sorted(options.keys() & _OF_THE_GRID):
        raise ValueError(f"{', '.join(decided)}: this follows from the grid; leave it out")
    window = next(filter(None, model.windows), None)
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": decoder.hidden_size,
        "num_attention_heads": decoder.num_heads,
        "num_query_groups": decoder.num_kv_heads,
        "kv_channels": decoder.head_dim,
        "ffn_hidden_size": decoder.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": decoder.norm_eps,
        "layernorm_zero_centered_gamma": decoder.norm_unit_offset,
        "activation_func": activation_function(decoder.activation, gated=False),
        "gated_linear_unit": decoder.gated_mlp,
        "add_bias_linear": False,
        "add_qkv_bias": decoder.attention_bias,
        "qk_layernorm": decoder.qk_norm is not None,
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
        "use_cpu_initialization": not gpu.is_available(),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }
    if layers_per_stage is not None:
        fields["pipeline_model_parallel_layout"] = _layout(layers_per_stage)
    if decoder.latent is not None:
        fields |= _latent_attention(decoder.latent)
    if experts is not None:
        fields |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": expert_tp or dims.tp,
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.top_k,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_layer_freq": [int(mixture is not None) for mixture in model.moe],
            **_experts(experts),
        }
        _check_experts(model, experts, fields["expert_tensor_parallel_size"], dims)
    elif dims.ep > 1:
        raise ValueError(f"ep={dims.ep} is for a mixture of experts, which {model.family} is not; leave it out")
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
        raise ValueError(f"cp_comm_type='p2p' (ring attention) has no sliding_window={window}; use 'a2a' (Ulysses)")
    return kind(**fields)


# Other values compute something else or hang, without an error.
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


def require_expressible(model: ModelConfig) -> None:
    """Raise ValueError for a model that Megatron-Core cannot express; name its values and the allowed values."""
    decoder, mixture = model.decoder, next(filter(None, model.moe), None)
    moe = None if mixture is None else vars(mixture)
    misfits = _inexpressible(vars(decoder), moe)
    if moe is not None and not all(model.moe) and moe["activation"] != decoder.activation:
        misfits.append("experts and MLPs of different activations (Megatron-Core: one activation)")
    if model.has_linear_attention:
        misfits.append("layers with linear attention (Megatron-Core: none in a GPTModel)")
    if misfits:
        raise ValueError(
            f"{model.family} has {', '.join(misfits)}, which is not supported on Megatron-Core; use the layers of "
            f"parallel-layers, or one of {', '.join(FAMILIES)}"
        )
    if decoder.latent is None:
        return
    if decoder.attention_bias:
        raise ValueError("attention_bias=True is not supported with latent attention; known checkpoints have none")
    if not decoder.rotary_interleaved:
        raise ValueError(
            "rope_interleave=False is not supported: latent attention rotates neighbouring dims, as DeepSeek's "
            "checkpoints want it"
        )


def _check(model: ModelConfig, dims: ParallelDims, chunks: int, layers_per_stage: list[int] | None) -> None:
    layers = model.num_layers
    require_expressible(model)
    if misfit := _tp_misfit(model, dims.tp):
        raise ValueError(f"{misfit}; use tp in {_fitting_tp(model)}")
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


def _fitting_tp(model: ModelConfig) -> list[int]:
    return [n for n in range(1, model.decoder.num_heads + 1) if not _tp_misfit(model, n)]


def _tp_misfit(model: ModelConfig, tp: int) -> str:
    """Return the first size that does not divide over `tp` ranks, empty where all do."""
    decoder = model.decoder
    sizes = {"num_attention_heads": decoder.num_heads, "intermediate_size": decoder.intermediate_size}
    for name, size in sizes.items():
        if size % tp:
            return f"{name}={size} is not divisible by tp={tp}"
    if decoder.num_kv_heads % tp and tp % decoder.num_kv_heads:
        return f"num_key_value_heads={decoder.num_kv_heads} and tp={tp}: one must divide the other"
    return ""


def _check_experts(model: ModelConfig, moe: MoEConfig, expert_tp: int, dims: ParallelDims) -> None:
    if moe.num_experts % dims.ep:
        fits = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        raise ValueError(f"{moe.num_experts} experts do not divide over ep={dims.ep}; use ep in {fits}")
    if moe.intermediate_size % expert_tp:
        fits = [n for n in _fitting_tp(model) if moe.intermediate_size % n == 0]
        raise ValueError(
            f"experts {moe.intermediate_size} wide do not divide over expert_tp={expert_tp}; use expert_tp=1, or tp in "
            f"{fits}"
        )
