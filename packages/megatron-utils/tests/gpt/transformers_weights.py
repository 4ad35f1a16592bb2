"""Map weights and gradients of a transformers model to the chunks of `build_gpt`, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_utils.gpt import PackedGPTModel

_RENAMED = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_fc2": "down_proj",
    "router.expert_bias": "gate.e_score_correction_bias",
    "mlp.router": "mlp.gate",
}
_LATENT_RENAMED = {
    **_RENAMED,
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
}


def expected_parameters(
    chunk: PackedGPTModel, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the value of each parameter of a chunk on this rank, from a transformers state dict (or its gradients).

    Mixtures are in transformers' stacked form: `mlp.experts.gate_up_proj [E, 2 I, H]`, `mlp.experts.down_proj [E, H,
    I]`. `tensors`: the tensors of the chunk to map, by name; default: its parameters.

    Raises:
        ValueError: The state dict has no tensor for a parameter.
    """
    tp, config = chunk.pg_collection.tp, chunk.config
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    heads = config.num_attention_heads // config.num_query_groups * config.kv_channels

    def part(whole: Tensor, shape: torch.Size) -> Tensor:
        """Return this rank's rectangle; the tail of a padded vocabulary is zero."""
        group = chunk.pg_collection.expt_tp if "mlp.experts" in name else tp
        for dim, (have, want) in enumerate(zip(whole.shape, shape, strict=True)):
            if have != want:
                rows = torch.arange(group.rank() * want, (group.rank() + 1) * want)
                kept = whole.index_select(dim, rows.clamp(max=have - 1))
                whole = torch.where((rows < have).view([-1 if d == dim else 1 for d in range(whole.dim())]), kept, 0)
        return whole

    def interleaved(kind: str) -> Tensor:
        """Return query, key and value rows, group by group of key-value heads."""
        q, k, v = (state[f"{layer}self_attn.{name}_proj.{kind}"] for name in "qkv")
        groups = zip(q.split(heads), k.split(config.kv_channels), v.split(config.kv_channels), strict=True)
        return torch.cat([x for group in groups for x in group])

    def gate_up(gate: Tensor, up: Tensor, shape: torch.Size) -> Tensor:
        half = torch.Size((shape[0] // 2, *shape[1:]))
        return torch.cat([part(gate, half), part(up, half)])

    renamed = _LATENT_RENAMED if config.multi_latent_attention else _RENAMED
    result = {}
    for name, parameter in (tensors or dict(chunk.named_parameters())).items():
        layer = ""
        rest = name
        if match := re.match(r"decoder\.layers\.(\d+)\.", name):
            layer, rest = f"model.layers.{numbers[int(match[1])]}.", name[match.end() :]
        kind = rest.rpartition(".")[2]
        if expert := re.match(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc(\d)", rest):
            ep = chunk.pg_collection.ep
            index = ep.rank() * (config.num_moe_experts // ep.size()) + int(expert[1])
            if expert[2] == "1":
                gate, up = state[f"{layer}mlp.experts.gate_up_proj"][index].chunk(2)
                result[name] = gate_up(gate, up, parameter.shape)
            else:
                result[name] = part(state[f"{layer}mlp.experts.down_proj"][index], parameter.shape)
        elif rest.startswith("self_attention.linear_qkv"):
            result[name] = part(interleaved(kind), parameter.shape)
        elif rest.startswith(("mlp.linear_fc1", "mlp.shared_experts.linear_fc1")):
            mlp = rest.partition(".linear_fc1")[0]
            gate, up = (state[f"{layer}{mlp}.{which}_proj.{kind}"] for which in ("gate", "up"))
            result[name] = gate_up(gate, up, parameter.shape)
        else:
            for mine, theirs in renamed.items():
                rest = rest.replace(mine, theirs)
            if layer + rest not in state:
                raise ValueError(f"no tensor {layer + rest} for parameter {name}")
            result[name] = part(state[layer + rest], parameter.shape)
    return result


@torch.no_grad()
def load_transformers_state(chunks: Iterable[PackedGPTModel], state: Mapping[str, Tensor]) -> None:
    """Copy a transformers state dict into the chunks of a model built by `build_gpt`."""
    for chunk in chunks:
        # Biases of routers are loaded, although no gradient reaches them.
        biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
        tensors = {**dict(chunk.named_parameters()), **biases}
        for name, value in expected_parameters(chunk, state, tensors).items():
            tensors[name].copy_(value)
