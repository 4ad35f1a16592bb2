"""A tiny model, and what the ranks of this package's tests import."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """Name the modules that these ranks need and that take a second or more to import."""
    return "torch.distributed.fsdp", "torch.distributed.pipelining"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in fp32."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **sizes)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3-MoE in fp32: 4 experts of 1 920 weights in each of 2 layers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "mixture"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    config = Qwen3MoeConfig(vocab_size=61, num_key_value_heads=2, head_dim=8, **sizes, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "head_dim": 8}
_DELTA_NET |= {"linear_value_head_dim": 6, "full_attention_interval": 2, "num_experts": 0}
_MAMBA = {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_head": 16}
_MAMBA |= {"mamba_d_state": 6, "shared_intermediate_size": 48, "num_local_experts": 0, "pad_token_id": None}
_NEMOTRON = {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 4, "head_dim": 8}
_NEMOTRON |= {"mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 6, "pad_token_id": None}
_KIMI = {"layer_types": _MAMBA["layer_types"], "mlp_layer_types": ["dense"] * 2, "q_lora_rank": None, "v_head_dim": 6}
_KIMI |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "num_key_value_heads": 4}
_KIMI |= {"linear_num_heads": 4, "linear_head_dim": 8, "pad_token_id": None}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA_NET),
    "granitemoehybrid": ("GraniteMoeHybrid", _MAMBA),
    "nemotron_h": ("NemotronH", _NEMOTRON),
    "kimi_linear": ("KimiLinear", _KIMI),
    "deep": ("NemotronH", _NEMOTRON | {"layers_block_type": [*_NEMOTRON["layers_block_type"], "linear_attention"]}),
}


@pytest.fixture(scope="session", params=[name for name in HYBRIDS if name != "deep"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny hybrid in fp32, of a layer with linear attention and a layer with full attention."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / request.param
    prefix, linear = HYBRIDS[request.param]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{prefix}Config")(**{"vocab_size": 61, "num_key_value_heads": 2, **sizes, **linear})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path
