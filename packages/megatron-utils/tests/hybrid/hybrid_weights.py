"""Map weights and gradients of transformers' hybrid models to the chunks of `build_hybrid`, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NAMES = {  # Megatron's name -> transformers', of Nemotron-H and of Qwen3-Next
    "nemotron_h": {
        "embedding.word_embeddings.weight": "model.embeddings.weight",
        "decoder.final_norm.weight": "model.norm_f.weight",
        r"input_layernorm|pre_mlp_layernorm|(?<!mixer\.)norm": "norm",
        "self_attention.linear_proj": "mixer.o_proj",
        "mlp.linear_fc1": "mixer.up_proj",
        "mlp.linear_fc2": "mixer.down_proj",
    },
    "qwen3_next": {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_norm.weight": "model.norm.weight",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        r"self_attention.(q|k)_layernorm": r"self_attn.\1_norm",
        r"self_attention.(conv1d|dt_bias|A_log|out_proj)": r"linear_attn.\1",
        "self_attention.out_norm": "linear_attn.norm",
        "mlp.router": "mlp.gate",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    },
}


def expected_parameters(chunk: Any, hf: Any, state: Mapping[str, Tensor], *, weights: bool = True) -> dict[str, Tensor]:
    """Return this rank's value of each parameter of a chunk from a state dict, or from its gradients."""
    tp, config = chunk.pg_collection.tp, chunk.config
    per_layer = 1 if hf.model_type == "nemotron_h" else 2  # Qwen3-Next's layers are two of Megatron's
    kv_heads = config.num_query_groups

    def part(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(tp.size(), dim)[tp.rank()] if tp.size() > 1 else tensor

    def parts(tensors: Any) -> Tensor:
        return torch.cat([part(tensor) for tensor in tensors])

    expected = {}
    for name, parameter in chunk.named_parameters():
        prefix, kind, rest = re.match(r"(?:decoder\.layers\.(\d+)\.)?(.*?)((?:weight|bias)?)$", name).groups()  # type: ignore[union-attr]
        del kind, rest
        stem = name
        if prefix is not None:
            layer = (int(prefix) + chunk.decoder.layers[0].layer_number - 1) // per_layer
            stem = name.removeprefix(f"decoder.layers.{prefix}.")
        layer_prefix = "" if prefix is None else f"model.layers.{layer}."

        def of(stem: str, layer_prefix: str = layer_prefix) -> Tensor:
            return state[layer_prefix + stem]

        expert = re.fullmatch(r"mlp.experts.local_experts.(\d+).linear_fc(1|2).weight", stem)
        if stem == "self_attention.linear_qkv.weight":
            attention = "mixer" if hf.model_type == "nemotron_h" else "self_attn"
            q, k, v = (of(f"{attention}.{letter}_proj.weight") for letter in "qkv")
            groups = q.unflatten(0, (kv_heads, -1))
            if config.attention_output_gate:  # query and gate of each head -> queries of a group, then gates
                groups = q.unflatten(0, (kv_heads, -1, 2, config.kv_channels)).transpose(1, 2).flatten(1, 3)
            k, v = (x.unflatten(0, (kv_heads, -1)) for x in (k, v))
            value = part(torch.cat([groups, k, v], 1)).flatten(0, 1)
        elif stem == "self_attention.in_proj.weight":
            keys, values = hf.linear_num_key_heads, hf.linear_num_value_heads
            sizes = [hf.linear_key_head_dim] * 2 + [values // keys * hf.linear_value_head_dim] * 2
            grouped = of("linear_attn.in_proj_qkvz.weight").unflatten(0, (keys, -1)).split(sizes, 1)
            gates = of("linear_attn.in_proj_ba.weight").unflatten(0, (keys, -1)).split([values // keys] * 2, 1)
            value = parts(x.flatten(0, 1) for x in (*grouped, *gates))
        elif stem == "self_attention.conv1d.weight":
            keys, values = (n * d for n, d in (
                (hf.linear_num_key_heads, hf.linear_key_head_dim), (hf.linear_num_value_heads, hf.linear_value_head_dim)
            ))  # fmt: skip
            value = parts(of("linear_attn.conv1d.weight").split([keys, keys, values]))
        elif re.fullmatch(r"mixer\.(in_proj|conv1d)[._](weight|bias)", stem):
            inner, groups = hf.mamba_num_heads * hf.mamba_head_dim, hf.n_groups * hf.ssm_state_size
            sizes = [inner, inner, groups, groups, hf.mamba_num_heads] if "in_proj" in stem else [inner, groups, groups]
            value = parts(of(stem.replace("conv1d_", "conv1d.")).split(sizes))
        elif stem == "mlp.shared_experts.linear_fc1.weight":
            value = parts(of(f"mlp.shared_expert.{half}_proj.weight") for half in ("gate", "up"))
        elif expert is not None:
            ep = chunk.pg_collection.ep
            number = int(expert[1]) + ep.rank() * hf.num_experts // ep.size()
            stacked = of("mlp.experts." + ("gate_up_proj" if expert[2] == "1" else "down_proj"))[number]
            value = parts(stacked.chunk(2)) if expert[2] == "1" else part(stacked, 1)
        else:
            for pattern, replacement in _NAMES[hf.model_type].items():
                stem = re.sub(pattern, replacement, stem)
            stem = stem.replace("output_layer", "lm_head")
            whole = of(stem, "" if prefix is None or stem.startswith("model.") else layer_prefix)
            dim = next((d for d, (a, b) in enumerate(zip(whole.shape, parameter.shape, strict=True)) if a != b), None)
            value = whole if dim is None else part(whole, dim)
            if weights and stem == "linear_attn.norm.weight":
                value = value - 1  # Megatron's norms are all centred at zero
        expected[name] = value
    return expected
