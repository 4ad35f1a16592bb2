"""The native models have the tensors of ckpt's layouts, in every family."""

from typing import Any

import pytest
import torch

import ckpt
from ckpt.layout import FAMILIES as LAYOUTS, adaptable
from hf_patches.testing import tiny_config
from parallel_layers import PackedSequence, RotaryEmbedding
from parallel_layers.model import FAMILIES
from parallel_models.model import Chunk
from rl_models import CausalLM, ModelConfig, ValueModel

# The biases of a layer; a family's config can ask for those that both tables read.
BIASES = {"attention_bias", "mlp_bias"}


@pytest.mark.families("family")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", ["plain", "tied", "biases"])
@pytest.mark.parametrize(("model", "role"), [(CausalLM, "causal_lm"), (ValueModel, "value")])
def test_the_models_have_the_tensors_of_the_layout(family: str, options: str, model: Any, role: Any) -> None:
    biases = BIASES & FAMILIES[family].reads & LAYOUTS[family].fields
    biases -= {"mlp_bias"} if family == "nemotron_h" else set()  # refused beside its experts
    changes = {"plain": {}, "tied": {"tie_word_embeddings": True}, "biases": dict.fromkeys(biases, True)}[options]
    values = tiny_config(family, **changes).to_dict()
    built = model(ModelConfig.from_hf(values), dtype=torch.float32, device="meta")
    blocks = ckpt.layout_for(values, role=role).at(ckpt.Place())
    assert {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()} == {
        name: tuple(block.shape) for name, block in blocks.items()
    }


def test_gemma_4_e2b_has_the_tensors_of_the_layout_on_every_stage() -> None:
    """Each chunk has the per-layer tables of its own layers."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    changes |= {"num_hidden_layers": 4, "layer_types": kinds, "enable_moe_block": False}
    values = tiny_config("gemma4_text", **changes).to_dict()
    layout = ckpt.layout_for(values, layers=[1, 2, 1])
    assert not any("tables" in name for name in adaptable(layout)[0])  # a stage would have part of an adapter
    for stage, layers in enumerate(layout.chunk_layers(ckpt.Grid(pp=3))):
        chunk = Chunk(layers, first=stage == 0, last=stage == 2)
        built = CausalLM(ModelConfig.from_hf(values), device="meta", chunks=[chunk])
        blocks = layout.at(ckpt.Place(pp=(stage, 3)))
        table = blocks[f"model.per_layer_tables.{layers[0]}.weight"]
        assert table.shape[1] == 8 * len(layers)
        assert {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()} == {
            name: tuple(block.shape) for name, block in blocks.items()
        }


@pytest.mark.parametrize("model_class", [CausalLM, ValueModel])
def test_a_model_makes_its_rotary_table_once_for_all_layers(model_class: Any) -> None:
    model = model_class(ModelConfig.from_hf(tiny_config("llama", num_hidden_layers=4)))
    tables = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    calls: list[Any] = []
    for table in tables:
        table.register_forward_hook(lambda *call: calls.append(call))
    model(PackedSequence.from_sequences([torch.arange(5), torch.arange(3)]))
    assert len(tables) == len(calls) == 1
