from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from safetensors import safe_open

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_hidden_layers": 3}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "num_hidden_layers": 3}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
GEMMA4_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA4_VISION |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
PIXTRAL |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 2}
KIMI_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
LINEAR = {"head_dim": 16, "num_hidden_layers": 3, "full_attention_interval": 3, "linear_num_key_heads": 4}
LINEAR |= {"linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
HYBRID_MOE = {**LINEAR, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 40}
KIMI_LINEAR = {
    **{name: size for name, size in {**MOE, **MLA}.items() if name != "n_routed_experts"},
    "q_lora_rank": None,
}
KIMI_LINEAR |= {"num_local_experts": 4, "linear_num_heads": 4, "linear_head_dim": 6}
KIMI_LINEAR |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
HYBRID_TYPES = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# One group of heads, which ranks share.
GRANITE_HYBRID = {**HYBRID_TYPES, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "attention_bias": True}
GRANITE_HYBRID |= {"shared_intermediate_size": 40, "mamba_proj_bias": True, "num_local_experts": 0}
NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 16}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 4}
NEMOTRON |= {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

# name -> (transformers configuration class, fields)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", {**MOE, "num_local_experts": 4}),
    "apertus": ("ApertusConfig", {}),
    "olmo2": ("Olmo2Config", {"attention_bias": True}),
    "deepseek": ("DeepseekV3Config", {**MOE, **MLA}),
    "deepseek-no-q-lora": ("DeepseekV3Config", {**MOE, **MLA, "q_lora_rank": None}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4-moe": ("Glm4MoeConfig", {**MOE, **ROUTED, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", {**MOE, **MLA}),
    "gpt-oss": ("GptOssConfig", {**MOE, "num_local_experts": 4, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {**GEMMA4, **MOE, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    ),
    "gemma4-e2b": (
        "Gemma4TextConfig",
        {
            **{**GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 45, "num_kv_shared_layers": 2},
            **{"attention_k_eq_v": False, "use_double_wide_mlp": True},
        },
    ),
    "gemma4-own-values": ("Gemma4TextConfig", {**GEMMA4, "attention_k_eq_v": False}),
    "granite": ("GraniteConfig", {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("GraniteMoeConfig", {**MOE, "num_local_experts": 4}),
    "olmo3": ("Olmo3Config", {"attention_bias": True}),
    "smollm3": ("SmolLM3Config", {}),
    "exaone4": ("Exaone4Config", {}),
    "deepseek-v2": ("DeepseekV2Config", {**MOE, **MLA}),
    "ernie": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "minimax": ("MiniMaxM2Config", {**MOE, "num_local_experts": 4, "head_dim": 16}),
    "ernie-moe": ("Ernie4_5_MoeConfig", {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_end_index": 1}),
    "cohere2": ("Cohere2Config", {"attention_bias": True}),
    "ministral3": ("Ministral3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40}),
    "qwen2-vl": ("Qwen2VLConfig", {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}}),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", {"vision_config": VISION}),
    "qwen3-vl": ("Qwen3VLConfig", {"vision_config": {**VISION, "deepstack_visual_indexes": [0]}}),
    "qwen3-vl-moe": (
        "Qwen3VLMoeConfig",
        {**MOE, "num_experts": 4, "head_dim": 16, "vision_config": {**VISION, "deepstack_visual_indexes": [0]}},
    ),
    "glm4v": ("Glm4vConfig", {"vision_config": VISION}),
    "glm4v-moe": ("Glm4vMoeConfig", {**MOE, **ROUTED, "vision_config": VISION}),
    "kimi-k2.5": ("Kimi_K25Config", {**MOE, **MLA, "vision_config": KIMI_VISION}),
    "gemma4-vl": ("Gemma4Config", {**GEMMA4, "vision_config": GEMMA4_VISION}),
    "qwen3-next": ("Qwen3NextConfig", {**HYBRID_MOE, "mlp_only_layers": [1], "attention_bias": True}),
    "qwen3.5-text": ("Qwen3_5TextConfig", LINEAR),
    "qwen3.5-moe-text": ("Qwen3_5MoeTextConfig", HYBRID_MOE),
    "qwen3.5-vl": ("Qwen3_5Config", {**LINEAR, "vision_config": VISION}),
    "qwen3.5-moe-vl": ("Qwen3_5MoeConfig", {**HYBRID_MOE, "vision_config": VISION}),
    # transformers saves convolutions in parts of one size.
    "olmo-hybrid": ("OlmoHybridConfig", {**LINEAR, "linear_value_head_dim": 2, "attention_bias": True}),
    "kimi-linear": ("KimiLinearConfig", KIMI_LINEAR),
    "granite-hybrid": ("GraniteMoeHybridConfig", GRANITE_HYBRID),
    "granite-hybrid-moe": ("GraniteMoeHybridConfig", {**GRANITE_HYBRID, "num_local_experts": 4}),
    "nemotron-h": ("NemotronHConfig", {**NEMOTRON, "use_bias": True, "moe_latent_size": 20}),
    "nemotron-h-plain": ("NemotronHConfig", NEMOTRON),
    "mistral3": ("Mistral3Config", {"model_type": "ministral3", "head_dim": 16, "vision_config": PIXTRAL}),
}


def build(name: str, **fields: Any) -> transformers.PreTrainedModel:
    """A random model in which every parameter differs from every other, biases and norms too."""
    class_name, own = MODELS[name]
    fields = {**SMALL, **own, **fields}
    factory: Any = transformers.AutoModelForCausalLM
    if "vision_config" in fields:
        # The text fields go into a configuration of their own, except what the whole model decides.
        outer = {key: fields.pop(key) for key in ("vision_config", "tie_word_embeddings") if key in fields}
        rope = (
            {} if class_name in ("Gemma4Config", "Kimi_K25Config", "Mistral3Config") else {"rope_parameters": {**ROPE}}
        )
        fields = {**outer, "text_config": fields | rope}
        factory = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = factory.from_config(getattr(transformers, class_name)(**fields))
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            if parameter.is_floating_point():
                parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("llama", vocab_size=51)`: a folder as transformers saves it, made once for each set of arguments.

    With `save_original_format=False` it is in the form that transformers has in memory.
    """
    made: dict[str, Path] = {}

    def make(name: str, max_shard_size: str = "5GB", save_original_format: bool = True, **fields: Any) -> Path:
        key = f"{name} {max_shard_size} {save_original_format} {fields}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            build(name, **fields).save_pretrained(
                made[key], max_shard_size=max_shard_size, save_original_format=save_original_format
            )
        return made[key]

    return make


def _read_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return tensors


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        # Bits, not values: NaN equals NaN, and -0.0 is not 0.0.
        assert torch.equal(actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.fixture(scope="session")
def read_all() -> Callable[[Path], dict[str, torch.Tensor]]:
    """`read_all(folder)`: every tensor of a folder, through the safetensors library."""
    return _read_all


@pytest.fixture(scope="session")
def assert_same() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]:
    """`assert_same(actual, expected)`: the same names, types, shapes and bits."""
    return _assert_same


@pytest.fixture
def memory_with_listings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The store in memory, which keeps what it has listed until `invalidate_cache`, as S3's and others do."""
    files = fsspec.filesystem("memory")
    kept = dict[tuple[Any, ...], Any]()

    def listed(self: Any, call: Callable[..., Any], path: str, *arguments: Any, **options: Any) -> Any:
        key = call, path, arguments, *options.items()
        # Another thread may clear it at any time.
        answer = kept.get(key) or call(self, path, *arguments, **options)
        kept[key] = answer
        return answer

    for name in ("ls", "find", "info"):
        monkeypatch.setattr(type(files), name, partialmethod(listed, getattr(type(files), name)))
    monkeypatch.setattr(type(files), "invalidate_cache", lambda *_: kept.clear())
    yield files
    files.store.clear()
