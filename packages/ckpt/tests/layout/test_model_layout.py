from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import pytest

from ckpt import Grid, Place, layout_for
from ckpt.layout.families.entries import FAMILIES
from ckpt.layout.pieces import cover_problem

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def test_local_names_and_shapes_of_the_native_layers() -> None:
    blocks = layout_for(LLAMA).at(Place(tp=(1, 4)))
    assert {name: block.shape for name, block in blocks.items() if "layers." not in name or ".2." in name} == {
        "model.embed_tokens.weight": (13, 32),
        "model.layers.2.input_layernorm.weight": (32,),
        "model.layers.2.self_attn.qkv_proj.weight": (24, 32),
        "model.layers.2.self_attn.o_proj.weight": (32, 8),
        "model.layers.2.post_attention_layernorm.weight": (32,),
        "model.layers.2.mlp.gate_up_proj.weight": (24, 32),
        "model.layers.2.mlp.down_proj.weight": (32, 12),
        "model.norm.weight": (32,),
        "lm_head.weight": (13, 32),
    }


def test_canonical_names_and_shapes_need_no_file() -> None:
    layout = layout_for({**LLAMA, "attention_bias": True, "head_dim": 16, "tie_word_embeddings": True})
    assert "lm_head.weight" not in layout.canonical
    assert layout.canonical["model.layers.3.self_attn.k_proj.bias"].shape == (32,)
    assert layout.canonical["model.layers.3.self_attn.o_proj.weight"].shape == (32, 64)


def test_a_tied_head_is_the_embedding_on_the_last_of_several_stages() -> None:
    layout = layout_for({**LLAMA, "tie_word_embeddings": True})
    assert "lm_head.weight" not in layout.at(Place())
    assert "lm_head.weight" not in layout.at(Place(pp=(0, 2)))
    head = layout.at(Place(tp=(1, 2), pp=(1, 2)))["lm_head.weight"]
    assert head.names == ("model.embed_tokens.weight",)
    assert head.pieces == layout.at(Place(tp=(1, 2), pp=(0, 2)))["model.embed_tokens.weight"].pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_whether_the_head_is_tied(family: str) -> None:
    assert [FAMILIES[family].ties_embeddings({"tie_word_embeddings": tied}) for tied in (False, True)] == [False, True]


def test_a_value_layout_has_a_score_and_no_head() -> None:
    blocks = layout_for(LLAMA, role="value").at(Place(tp=(1, 2)))
    assert blocks["score.weight"].shape == (1, 32)
    assert blocks["score.bias"].shape == (1,)
    assert "lm_head.weight" not in blocks


def test_a_layout_with_both_heads_has_them_on_the_last_stage() -> None:
    layout = layout_for(LLAMA, role="causal_lm_with_value")
    assert layout.canonical.keys() == (
        layout_for(LLAMA).canonical.keys() | layout_for(LLAMA, role="value").canonical.keys()
    )
    first, last = (layout.at(Place(tp=(1, 2), pp=(stage, 2))) for stage in range(2))
    assert not {"lm_head.weight", "score.weight", "score.bias"} & first.keys()
    assert last["lm_head.weight"] == layout_for(LLAMA).at(Place(tp=(1, 2), pp=(1, 2)))["lm_head.weight"]
    assert last["score.weight"].shape == (1, 32)
    with pytest.raises(ValueError, match="a GPTModel has one output layer; use target='parallel'"):
        layout_for(LLAMA, "megatron", "causal_lm_with_value")


def test_a_rank_beyond_the_vocabulary_holds_padding() -> None:
    block = layout_for({**LLAMA, "vocab_size": 5}).at(Place(tp=(3, 4)))["lm_head.weight"]
    assert block.shape == (2, 32)
    assert [piece.is_padding for piece in block.pieces] == [True]
    assert block.names == ("lm_head.weight",)


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    layout = layout_for(LLAMA, target="megatron", vocab_multiple=16)
    assert layout.at(Place(tp=(1, 2)))["output_layer.weight"].shape == (32, 32)


def test_megatron_orders_queries_keys_and_values_by_group() -> None:
    block = layout_for(LLAMA, target="megatron").at(Place())["decoder.layers.0.self_attention.linear_qkv.weight"]
    rows = [(piece.name.split(".")[-2], *piece.canonical_range[0]) for piece in block.pieces if piece.canonical_range]
    assert rows == [
        ("q_proj", 0, 16),
        ("k_proj", 0, 8),
        ("v_proj", 0, 8),
        ("q_proj", 16, 32),
        ("k_proj", 8, 16),
        ("v_proj", 8, 16),
    ]


def test_megatron_numbers_layers_in_their_chunk() -> None:
    layout = layout_for(LLAMA, target="megatron", layers=[1, 3])
    names = [name for name in layout.at(Place(pp=(1, 2))) if "linear_proj" in name]
    assert names == [f"decoder.layers.{layer}.self_attention.linear_proj.weight" for layer in range(3)]


HEADS_14 = {"num_attention_heads": 14, "head_dim": 8}
KEYS_3 = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        (HEADS_14, Place(tp=(0, 4)), r"num_attention_heads=14 is not divisible by tp=4; use tp in {1, 2}"),
        (KEYS_3, Place(tp=(0, 2)), r"num_key_value_heads=3 neither divides tp=2 .*; use tp in {1, 3, 6}"),
        ({"intermediate_size": 50}, Place(tp=(0, 4)), r"size=50 is not divisible by tp=4; use tp in {1, 2}"),
        ({"num_hidden_layers": 3}, Place(pp=(0, 4)), "num_hidden_layers=3 is fewer than the 4 chunks"),
        ({}, Place(ep=(0, 2)), "ep=2 would divide experts, and this llama model has none; leave it out"),
        ({}, Place(etp=(1, 2)), "etp=2 would divide experts, and this llama model has none; leave it out"),
    ],
)
@pytest.mark.parametrize("target", ["parallel", "megatron"])
def test_what_does_not_divide_is_refused_with_the_fix(
    fields: dict[str, Any], place: Place, message: str, target: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        layout_for({**LLAMA, **fields}, target).at(place)


NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 1536}


@pytest.mark.parametrize("config", [{**LLAMA, **HEADS_14}, {**LLAMA, **KEYS_3}, {**LLAMA, **NINE}], ids=str)
def test_the_sizes_that_an_error_names_are_those_that_fit(config: dict[str, Any]) -> None:
    layout = layout_for(config)

    def fits(tp: int) -> bool:
        with contextlib.suppress(ValueError):
            return bool(layout.at(Place(tp=(0, tp))))
        return False

    named = ", ".join(str(tp) for tp in range(1, 33) if fits(tp))
    with pytest.raises(ValueError, match=rf"use tp in {{{named}}}$"):
        layout.require_tp(64)
    assert named == {14: "1, 2", 6: "1, 3, 6", 9: "1, 3"}[config["num_attention_heads"]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["OddForCausalLM"]}, "OddForCausalLM.*known: .*llama"),
        ({"architectures": [], "model_type": "odd"}, "'odd' is not a known family"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_experts=8 would change the layout"),
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"hidden_size": 33}, "hidden_size=33 is not divisible by num_attention_heads=4"),
    ],
)
def test_an_unknown_model_or_field_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_for({**LLAMA, **fields})


ODD = [None, True, -1, 0, 10**18, 1.5, math.nan, "x", "4", [], [1], ["a"], {}, [[]]]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_damaged_configuration_is_refused_at_once(value: Any) -> None:
    """Any value of a field gives a layout or a ValueError within seconds."""
    config = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 8}
    config |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "mlp_only_layers": [0], "head_dim": 8}
    start = time.monotonic()
    for field in (*config, "quantization_config", "text_config", "tie_word_embeddings", "decoder_sparse_step"):
        with contextlib.suppress(ValueError):
            layout_for({**config, field: value}).at(Place(tp=(1, 2), ep=(0, 2)))
    assert time.monotonic() - start < 10


def test_an_older_configuration_has_the_same_layout() -> None:
    old = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    layout = layout_for({**old, "torch_dtype": "bfloat16", "rope_theta": 1e4, "rope_scaling": None})
    assert layout.canonical["model.layers.0.self_attn.k_proj.weight"].shape == (32, 32)


def test_unknown_targets_and_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="target='deepspeed'"):
        layout_for(LLAMA, target="deepspeed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="role='critic'"):
        layout_for(LLAMA, role="critic")  # type: ignore[arg-type]


MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}


@pytest.mark.parametrize("target", ["parallel", "megatron", "megatron_te"])
@pytest.mark.parametrize(
    ("config", "grid"),
    [
        *(
            (LLAMA, Grid(tp=tp, pp=pp, vpp=vpp))
            for tp, pp, vpp in ((1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (4, 4, 1))
        ),
        *((MOE, Grid(tp=tp, ep=ep, etp=etp)) for tp, ep, etp in ((2, 1, None), (1, 4, None), (4, 2, 1), (2, 2, 2))),
    ],
)
def test_all_places_together_hold_every_element(target: Any, config: dict[str, Any], grid: Grid) -> None:
    layout = layout_for(config, target)
    held: dict[str, set[Any]] = {name: set() for name in layout.canonical}
    for place in grid.places():
        for block in layout.at(place).values():
            for piece in block.pieces:
                if piece.canonical_range is not None:
                    held[piece.name].add(piece.canonical_range)
    for name, boxes in held.items():
        assert cover_problem(sorted(boxes), layout.canonical[name].shape) is None, name
