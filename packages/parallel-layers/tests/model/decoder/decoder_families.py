"""The families that the tests of DecoderLayer share: transformers' layers, and the configs that are to equal them."""

import re
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from parallel_layers.attention import LatentConfig
from parallel_layers.model.decoder import DecoderConfig
from parallel_layers.moe import ClampedSwiGLU, MoEConfig
from parallel_layers.rotary import yarn_softmax_scale
from parallel_layers.rotary.embedding import RotaryEmbedding

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPS, WINDOW = 32, 4, 2, 8, 48, 1e-5, 5

SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "rms_norm_eps": EPS,
    "attn_implementation": "eager",
}
LLAMA = DecoderConfig(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INTERMEDIATE,
    norm_eps=EPS,
)


LATENT = LatentConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=14)
DEEPSEEK = replace(
    LLAMA,
    num_kv_heads=HEADS,
    head_dim=None,
    latent=LATENT,
    rotary_interleaved=True,
    moe=MoEConfig(
        num_experts=16,
        top_k=4,
        intermediate_size=12,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=4,
        top_k_groups=2,
        routed_scaling_factor=2.5,
        shared_intermediate_size=24,
    ),
)
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
DEEPSEEK_SIZES = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT.kv_lora_rank,
    "q_lora_rank": LATENT.q_lora_rank,
    "qk_nope_head_dim": LATENT.qk_nope_head_dim,
    "qk_rope_head_dim": LATENT.qk_rope_head_dim,
    "v_head_dim": LATENT.v_head_dim,
    "moe_intermediate_size": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}


@dataclass(frozen=True)
class Family:
    """A layer of transformers and the config that is to equal it.

    transformers is imported where the reference is run: the ranks, which load this file too, do without it.
    """

    name: str
    ours: DecoderConfig
    options: dict[str, Any] = field(default_factory=dict)
    rotary_dim: int | None = None  # of a head's dims; None: all

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self.options.get("rope_parameters") if self.ours.latent else None
        return RotaryEmbedding(self.rotary_dim or self.ours.head_dim, parameters=parameters)(positions)

    def their_table(self, table: Tensor) -> Tensor:
        """cos or sin in the form that transformers' layer takes; gpt-oss takes one half, as both are the same."""
        return table.chunk(2, dim=-1)[0] if self.ours.attention_sinks else table

    def build(self) -> nn.Module:
        module = re.sub("(?<=.)(?=Moe|V3|Oss|Next)", "_", self.name).lower()
        config = resolve_name(f"transformers.models.{module}.configuration_{module}:{self.name}Config")
        layer = resolve_name(f"transformers.models.{module}.modeling_{module}:{self.name}DecoderLayer")
        return layer(config(**(SIZES | self.options)), 0)

    def router(self, layer: nn.Module) -> nn.Module:
        """transformers' router of the layer, which returns the choice last."""
        return layer.mlp.gate

    def by_our_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """transformers' parameters (or their gradients), still whole, as this library lays them out."""
        return tensors


class GptOss(Family):
    """Its experts' weights are `[E, in, out]`, gate and up take turns in the last dim, and the router is `router`."""

    def build(self) -> nn.Module:
        layer = super().build()
        experts = layer.mlp.experts
        # transformers 5.17 does not read these from the config.
        experts.alpha, experts.limit = self.options["swiglu_alpha"], self.options["swiglu_limit"]
        return layer

    def router(self, layer: nn.Module) -> nn.Module:
        return layer.mlp.router

    def by_our_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ours = {}
        for name, tensor in tensors.items():
            if "gate_up" in name:
                tensor = torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)
            ours[name.replace("mlp.router", "mlp.gate")] = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        return ours


class Cohere2(Family):
    """Each number of its tables of cos and sin stands twice, as its rotated pairs are neighbours."""

    def their_table(self, table: Tensor) -> Tensor:
        return table.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1)


class Gemma4(Family):
    """A layer with full attention and experts; its MLP is the shared expert here, and its router `gate`."""

    def build(self) -> nn.Module:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextConfig, Gemma4TextDecoderLayer

        layer = Gemma4TextDecoderLayer(Gemma4TextConfig(**SIZES, **self.options), 0)
        layer.self_attn.store_full_length_kv = False  # into a dict that the model hands in from transformers 5.24 on
        return layer

    def router(self, layer: nn.Module) -> nn.Module:
        return layer.router

    def by_our_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ours = {"mlp": "mlp.shared_experts", "experts": "mlp.experts", "router": "mlp.gate", "router.proj": "mlp.gate"}
        ours |= {"post_feedforward_layernorm_1": "mlp.shared_output_norm"}
        ours |= {"pre_feedforward_layernorm_2": "mlp.routed_norm"}
        ours |= {"post_feedforward_layernorm_2": "mlp.routed_output_norm"}
        found = {}
        for name, tensor in tensors.items():
            own = max((prefix for prefix in ours if name.startswith(f"{prefix}.")), key=len, default="")
            found[ours.get(own, "") + name.removeprefix(own)] = tensor
        return found


class LlamaWithSinks(Family):
    """A Llama layer with gpt-oss's attention, for the tests that leave mixtures of experts out."""

    def build(self) -> nn.Module:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig

        layer = super().build()
        layer.self_attn = GptOssAttention(GptOssConfig(**SIZES, **SINKS), 0)
        return layer


SINKS = {
    "layer_types": ["sliding_attention"],
    "num_hidden_layers": 1,
    "sliding_window": WINDOW,
    "attention_bias": True,
}
GPT_OSS_ATTENTION = replace(LLAMA, attention_bias=True, output_bias=True, attention_sinks=True, window=WINDOW)
FAMILIES = {
    "llama": Family("Llama", LLAMA),
    "glm": Family(
        "Glm",
        replace(LLAMA, attention_bias=True, rotary_interleaved=True),
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        rotary_dim=HEAD_DIM // 2,
    ),
    "llama with biases": Family(
        "Llama",
        replace(LLAMA, attention_bias=True, output_bias=True, mlp_bias=True),
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama with other heads": Family(
        "Llama", replace(LLAMA, num_kv_heads=1, head_dim=16), {"num_key_value_heads": 1, "head_dim": 16}
    ),
    "qwen2": Family("Qwen2", replace(LLAMA, attention_bias=True)),
    "qwen3": Family("Qwen3", replace(LLAMA, qk_norm="head", head_dim=12), {"head_dim": 12}),
    "gemma2": Family(
        "Gemma2",
        replace(
            LLAMA,
            activation="gelu_pytorch_tanh",
            norm_placement="sandwich",
            norm_unit_offset=True,
            window=WINDOW,
            attention_scale=10**-0.5,
            attention_softcap=0.5,
        ),
        {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 0.5, "sliding_window": WINDOW},
    ),
    "gemma4": Gemma4(
        "Gemma4",
        replace(
            LLAMA,
            head_dim=12,
            num_kv_heads=1,
            activation="gelu_pytorch_tanh",
            norm_placement="sandwich",
            qk_norm="head",
            value_norm=True,
            keys_as_values=True,
            attention_scale=1.0,
            output_scale=True,
            moe=MoEConfig(
                num_experts=8,
                top_k=3,
                intermediate_size=20,
                shared_intermediate_size=INTERMEDIATE,
                scaled_router=True,
                branch_norms=True,
                norm_eps=EPS,
                activation="gelu_pytorch_tanh",
            ),
        ),
        {
            **{"num_hidden_layers": 1, "layer_types": ["full_attention"], "attention_k_eq_v": True},
            **{"global_head_dim": 12, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
            **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 20},
        },
    ),
    "qwen3 moe": Family(
        "Qwen3Moe",
        replace(LLAMA, qk_norm="head", moe=MoEConfig(num_experts=8, top_k=3, intermediate_size=20)),
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "mixtral": Family(
        "Mixtral",
        replace(LLAMA, moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=INTERMEDIATE)),
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek": Family(
        "DeepseekV3",
        replace(DEEPSEEK, attention_scale=yarn_softmax_scale(LATENT.qk_head_dim, DEEPSEEK_YARN)),
        DEEPSEEK_SIZES | {"rope_parameters": DEEPSEEK_YARN},
        rotary_dim=LATENT.qk_rope_head_dim,
    ),
    "deepseek, dense, queries in one step, biases": Family(
        "DeepseekV3",
        replace(
            DEEPSEEK,
            moe=None,
            latent=replace(LATENT, q_lora_rank=None),
            attention_bias=True,
            output_bias=True,
            rotary_interleaved=False,
        ),
        DEEPSEEK_SIZES
        | {"first_k_dense_replace": 1, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
        rotary_dim=LATENT.qk_rope_head_dim,
    ),
    "qwen3 next": Family(
        "Qwen3Next",
        replace(LLAMA, qk_norm="head", norm_unit_offset=True, output_gate=True),
        {
            **{"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_experts": 0},
            **{"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        },
        rotary_dim=HEAD_DIM // 2,
    ),
    "olmo2": Family("Olmo2", replace(LLAMA, qk_norm="full", norm_placement="post")),
    "cohere2": Cohere2(
        "Cohere2",
        replace(
            LLAMA,
            normalization="layer",
            norm_placement="parallel",
            norm_eps=0.1,
            rotary_interleaved=True,
            window=WINDOW,
        ),
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": WINDOW, "layer_norm_eps": 0.1},
    ),
    "gpt-oss attention": LlamaWithSinks("Llama", GPT_OSS_ATTENTION),
    "gpt-oss": GptOss(
        "GptOss",
        replace(
            GPT_OSS_ATTENTION,
            moe=MoEConfig(
                num_experts=8,
                top_k=3,
                intermediate_size=20,
                router_bias=True,
                expert_bias=True,
                activation=ClampedSwiGLU(alpha=1.3, limit=2.0),
            ),
        ),
        SINKS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 20,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 2.0,  # many numbers reach this bound
        },
    ),
}


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()
