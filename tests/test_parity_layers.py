"""A decoder layer has the parameters that ckpt's native layouts fill: the same names, the same shapes, at every tp."""

from typing import Any

import pytest
from torch.distributed import ProcessGroup
from transformers import DeepseekV3Config

import ckpt
from parallel_layers import DecoderConfig, DecoderLayer, Placement
from parallel_layers.attention import LatentConfig
from parallel_layers.moe import MoEConfig
from parallel_layers.testing import RankPool

SIZES = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


def deepseek(q_lora_rank: int | None) -> tuple[DeepseekV3Config, list[DecoderConfig]]:
    """A dense layer and one of experts, as transformers' config and as ours."""
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=24, moe_intermediate_size=12, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, num_mtp_layers=0, q_lora_rank=q_lora_rank,
        architectures=["DeepseekV3ForCausalLM"], **SIZES,
    )  # fmt: skip
    moe = MoEConfig(
        num_experts=4, top_k=2, intermediate_size=12, scoring="sigmoid", correction_bias=True, num_groups=2,
        shared_intermediate_size=12,
    )  # fmt: skip
    latent = LatentConfig(q_lora_rank=q_lora_rank, **SIZES)
    common = DecoderConfig(hidden_size=16, num_heads=4, num_kv_heads=4, intermediate_size=24, latent=latent)
    return config, [common, DecoderConfig(**{**vars(common), "moe": moe})]


def shapes(group: ProcessGroup | None, layers: list[DecoderConfig]) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{i}.{name}": tuple(tensor.shape)
        for i, config in enumerate(layers)
        for name, tensor in DecoderLayer(config, placement=Placement(group), device="meta").state_dict().items()
    }


@pytest.mark.parametrize("q_lora_rank", [None, 14])
def test_latent_attention_has_the_tensors_of_its_layout(ranks: RankPool, q_lora_rank: int | None) -> None:
    config, layers = deepseek(q_lora_rank)
    layout = ckpt.layout_for(config.to_dict(), "parallel")
    for tp in (1, 2):
        results: list[Any] = [shapes(None, layers)] if tp == 1 else ranks.run(shapes, layers, world=tp)
        for rank, ours in enumerate(results):
            blocks = layout.at(ckpt.Place(tp=(rank, tp)))
            assert ours == {name: tuple(b.shape) for name, b in blocks.items() if name.startswith("model.layers.")}
