from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import Grid, Layout, Place, layout_for, load_hf, save_hf
from ckpt.layout.families.entries import FAMILIES
from ckpt.layout.families.rows import ATTENTION, ENDS, GATED_MLP, norms
from ckpt.layout.families.table import Family

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]

DENSE = ["llama", "mistral", "qwen2-tied", "qwen3", "apertus", "olmo2", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"]
DENSE += ["glm4", "seed-oss", "gemma2", "gemma3", "granite", "olmo3", "smollm3", "exaone4", "ernie", "phi3", "cohere2"]
DENSE += ["ministral3", "gemma4", "gemma4-own-values", "gemma4-e2b", "gemma4-vl", "mistral3"]
DENSE += ["qwen3.5-text", "qwen3.5-vl"]
DENSE += ["olmo-hybrid", "granite-hybrid"]
# Megatron-Core has no tensors for their norms or their router.
NATIVE_ALONE = ["ernie-moe", "cohere2", "gemma4", "gemma4-vl", "gemma4-moe", "gemma4-own-values"]
NATIVE_ALONE += ["gemma4-e2b", "qwen3-next", "qwen3.5-text", "qwen3.5-moe-text", "qwen3.5-vl", "qwen3.5-moe-vl"]
NATIVE_ALONE += ["olmo-hybrid", "kimi-linear", "granite-hybrid", "granite-hybrid-moe"]
NATIVE_ALONE += ["nemotron-h"]
OTHER_NAMES = ["kimi-k2.5"]
OTHER_NAMES += ["olmo-hybrid", "kimi-linear"]
MOE = [
    "qwen3-moe",
    "mixtral",
    "deepseek",
    "deepseek-no-q-lora",
    "glm4-moe",
    "glm4-moe-lite",
    "qwen2-moe",
    "gpt-oss",
    "granitemoe",
    "deepseek-v2",
    "minimax",
    "qwen3-vl-moe",
    "glm4v-moe",
    "kimi-k2.5",
    "ernie-moe",
    "gemma4-moe",
    "qwen3-next",
    "qwen3.5-moe-text",
    "qwen3.5-moe-vl",
    "kimi-linear",
    "granite-hybrid-moe",
    "nemotron-h",
    "nemotron-h-plain",
]
GRIDS = [Grid(), Grid(tp=2, pp=2), Grid(tp=4)]
MOE_GRIDS = [Grid(), Grid(tp=2, ep=2, pp=3), Grid(tp=4, ep=2, etp=1), Grid(tp=2, ep=4, etp=2)]
TARGETS = ("parallel", "megatron", "megatron_te")
# The quick run has these families on each grid and for each target once; each other family once, on a grid and for a
# target in turn.
ON_EVERY_GRID = ("llama", "qwen3-vl", "qwen3-moe", "deepseek")


def is_quick(name: str, number: int, index: int, turn: int, grids: int) -> bool:
    if name in ON_EVERY_GRID:
        return (number + index + turn) % 3 == 0
    return index == number % grids and turn == (0 if name in NATIVE_ALONE else number // grids % 3)


CASES = [
    pytest.param(name, grid, target, marks=() if is_quick(name, number, index, turn, len(grids)) else pytest.mark.slow)
    for names, grids in ((DENSE, GRIDS), (MOE, MOE_GRIDS))
    for number, name in enumerate(names)
    for index, grid in enumerate(grids)
    for turn, target in enumerate(TARGETS)
]


def load_own(folder: Path, layout: Layout, place: Place) -> dict[str, Tensor]:
    """A place's tensors, of which it reads no byte that it does not hold; only the vocabulary's padding is not read."""
    with counted("preadv") as reads:
        tensors = load_hf(folder, layout, place)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert 0.9 * held <= sum(reads) <= held
    return tensors


def through(folder: Path, target: Any, grid: Grid, out: Path) -> Path:
    """Load every place of a grid and save all of them again."""
    layout = layout_for(folder, target)
    places = list(grid.places())
    save_hf(out, [load_own(folder, layout, place) for place in places], layout, places)
    return out


@pytest.mark.families("name")
@pytest.mark.parametrize(("name", "grid", "target"), CASES, ids=str)
def test_every_family_goes_through_every_target_and_comes_back(
    name: str,
    grid: Grid,
    target: Any,
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    tmp_path: Path,
) -> None:
    folder = checkpoint(name)
    if name in NATIVE_ALONE and target != "parallel":
        with pytest.raises(ValueError, match=f"target='{target}': Megatron-Core has no tensor for .*; use target="):
            layout_for(folder, target)
        return
    expected = read_all(folder)
    if name == "qwen3-vl-moe":
        # Published files have the experts' inputs before their outputs; transformers saves them the other way round.
        expected = {key: x.transpose(1, 2).contiguous() if ".experts." in key else x for key, x in expected.items()}
        folder = through(folder, target, Grid(), tmp_path / "published")
        assert_same(read_all(folder), expected)
    if name in OTHER_NAMES:  # transformers saves some tensors under names that the family's own files do not have
        published = {alias: key for key, one in layout_for(folder).canonical.items() for alias in one.aliases}
        expected = {published.get(key, key): x for key, x in expected.items()}
        folder = through(folder, target, Grid(), tmp_path / "published")
    assert_same(read_all(through(folder, target, grid, tmp_path / "out")), expected)
    towers = any("visual" in tensor or "vision_tower" in tensor for tensor in expected)
    assert towers == ("-vl" in name or name.startswith(("glm4v", "kimi-k", "mistral3")))


def test_every_table_is_tested(checkpoint: Checkpoints) -> None:
    tested = {layout_for(checkpoint(name)).family.name for name in (*DENSE, *MOE)}
    assert tested == set(FAMILIES)
    assert len(tested) == 48


# Llama's MLP with Apertus's names of norms: a table that no family of ours has, of rows that they share.
TOY = Family(
    name="toy",
    class_prefix="Toy",
    rows=(*ENDS, *norms("attention_layernorm", "feedforward_layernorm"), *ATTENTION, *GATED_MLP),
    flags={"qkv_bias": True, "qk_norm": True, "mlp_bias": "mlp_bias"},
)
TOY_CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 9,
}
TOY_LAYER = {
    "attention_layernorm.weight": (8,),
    "feedforward_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.q_proj.bias": (8,),
    "self_attn.k_proj.bias": (4,),
    "self_attn.v_proj.bias": (4,),
    "self_attn.q_norm.weight": (2,),
    "self_attn.k_norm.weight": (2,),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}


@pytest.mark.parametrize("target", ["parallel", "megatron", "megatron_te"])
def test_a_new_family_needs_a_table_and_no_code(
    target: Any, monkeypatch: pytest.MonkeyPatch, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"'ToyForCausalLM'\] .* is not a known family"):
        layout_for(TOY_CONFIG)
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in TOY_LAYER.items()}
    shapes |= {"model.embed_tokens.weight": (9, 8), "model.norm.weight": (8,), "lm_head.weight": (9, 8)}
    folder = tmp_path / "toy"
    folder.mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TOY_CONFIG))
    assert "model.layers.1.self_attn.qkv_proj.weight" in load_hf(folder, layout_for(folder))
    for index, grid in enumerate([Grid(), Grid(tp=2, pp=2)]):
        assert_same(read_all(through(folder, target, grid, tmp_path / str(index))), read_all(folder))


def test_experts_are_stacked_on_the_native_layers(checkpoint: Checkpoints, read_all: ReadAll) -> None:
    folder = checkpoint("qwen3-moe")
    state = read_all(folder)
    place = Place(tp=(1, 2), ep=(1, 2))
    tensors = load_hf(folder, layout_for(folder), place)
    expert = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    gate_up = [torch.cat([state[expert.format(e, part)].chunk(2)[1] for part in ("gate", "up")]) for e in (2, 3)]
    assert torch.equal(tensors["model.layers.0.mlp.experts.gate_up_proj"], torch.stack(gate_up))
    down = [state[expert.format(e, "down")].chunk(2, dim=1)[1] for e in (2, 3)]
    assert torch.equal(tensors["model.layers.0.mlp.experts.down_proj"], torch.stack(down))
    # Layer 1 is dense by the config's mlp_only_layers.
    assert tensors["model.layers.1.mlp.gate_up_proj.weight"].shape == (48, 32)
    whole = load_hf(folder, layout_for(folder), Place(tp=(1, 2), ep=(1, 2), etp=(0, 1)))
    assert whole["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 48, 32)


def test_a_router_bias_keeps_its_type(checkpoint: Checkpoints) -> None:
    folder = checkpoint("deepseek")
    tensors = load_hf(folder, layout_for(folder), dtype=torch.bfloat16)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear", "granite-hybrid", "nemotron-h"])
def test_parameters_of_a_recurrence_keep_their_type(name: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(name)
    tensors = load_hf(folder, layout_for(folder), dtype=torch.bfloat16)
    wide = {name.split(".", 3)[-1] for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    gate = {f"linear_attn.decay.{name}" for name in ("A_log", "dt_bias")}
    space = {f"linear_attn.{name}" for name in ("state_space.A_log", "state_space.D", "state_space.dt_bias")}
    space |= {"linear_attn.conv1d.bias"}
    expected = {
        "qwen3-next": gate,
        "kimi-linear": {*gate, "mlp.gate.weight", "mlp.gate.e_score_correction_bias"},
        "granite-hybrid": space,
        "nemotron-h": {*space, "mlp.gate.weight", "mlp.gate.e_score_correction_bias"},
    }
    assert wide == {*expected[name], "linear_attn.conv1d.weight"}


@pytest.mark.parametrize("form", ["thirds", "joined"])
def test_convolutions_are_read_in_the_parts_of_transformers(
    form: str, checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    """transformers joins OLMo Hybrid's convolutions of q, k and v, and saves thirds although v has more channels."""
    thirds, joined = (
        checkpoint("olmo-hybrid", linear_value_head_dim=6, save_original_format=original) for original in (True, False)
    )
    folder, prefix = thirds if form == "thirds" else joined, "model.layers.0.linear_attn."
    assert read_all(thirds)[f"{prefix}v_conv1d.weight"].shape == (26, 1, 4)
    parts = read_all(joined)[f"{prefix}conv1d.weight"].split([16, 16, 48])
    for rank in range(2):
        local = load_hf(folder, layout_for(folder), Place(tp=(rank, 2)))
        assert torch.equal(local[f"{prefix}conv1d.weight"], torch.cat([part.chunk(2)[rank] for part in parts]))
    saved = read_all(through(folder, "parallel", Grid(), tmp_path / "out"))
    assert all(
        torch.equal(saved[f"{prefix}{kind}_conv1d.weight"], part) for kind, part in zip("qkv", parts, strict=True)
    )
    other = edited(folder, tmp_path / "other", {"linear_value_head_dim": 4}, lambda tensors: None)
    with pytest.raises(
        ValueError, match=r"config\.json and the files disagree|missing: model\.layers\.0\.linear_attn\."
    ):
        load_hf(other, layout_for(other))


def test_a_published_config_of_kimi_linear_has_the_layout_of_transformers(checkpoint: Checkpoints) -> None:
    stated = json.loads((checkpoint("kimi-linear") / "config.json").read_text())
    published = {name: value for name, value in stated.items() if not name.startswith(("linear_", "layer_types"))}
    section = {"head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 4}
    listed = {**published, "linear_attn_config": {**section, "kda_layers": [1, 2], "full_attn_layers": [3]}}
    assert layout_for(listed).canonical == layout_for(stated).canonical
    unlisted = layout_for({**published, "linear_attn_config": section, "num_hidden_layers": 9})
    assert [layer for layer in range(9) if "full" in unlisted.kinds(layer)] == [4, 8]


def test_a_config_of_granite_states_the_head_size_by_the_width(checkpoint: Checkpoints) -> None:
    stated = json.loads((checkpoint("granite-hybrid") / "config.json").read_text())
    size = stated["hidden_size"] // stated["mamba_n_heads"]
    automatic, explicit = (layout_for({**stated, "mamba_expand": 3, "mamba_d_head": d}) for d in ("auto", 3 * size))
    assert automatic.canonical == explicit.canonical


def test_a_published_config_of_nemotron_h_has_the_layout_of_transformers(checkpoint: Checkpoints) -> None:
    stated = json.loads((checkpoint("nemotron-h") / "config.json").read_text())
    published = {name: value for name, value in stated.items() if name != "layers_block_type"}
    published |= {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4}
    assert layout_for(published).canonical == layout_for(stated).canonical
    with pytest.raises(ValueError, match=r"the type '\+' of layer 1 is unknown; use one of \['linear_attention', "):
        layout_for({**published, "hybrid_override_pattern": "M+"})


def test_layers_of_multi_token_prediction_of_nemotron_h_are_not_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = edited(
        checkpoint("nemotron-h"), tmp_path / "out", {"num_nextn_predict_layers": 1},
        lambda tensors: tensors.update({"mtp.layers.0.norm.weight": torch.ones(3)}),
    )  # fmt: skip
    assert load_hf(folder, layout_for(folder)).keys() == layout_for(folder).at(Place()).keys()


def edited(folder: Path, out: Path, config: dict[str, Any], edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **config}))
    return out


def test_the_text_part_is_found_under_either_prefix(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    folder = checkpoint("qwen2-vl")
    other = edited(folder, tmp_path / "other", {}, rename)
    expected, actual = load_hf(folder, layout_for(folder)), load_hf(other, layout_for(other))
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_a_vision_tower_lies_whole_on_the_first_stage(checkpoint: Checkpoints, read_all: ReadAll) -> None:
    folder = checkpoint("qwen3-vl")
    state = read_all(folder)
    tower = {name for name in state if "visual" in name}
    assert len(tower) > 10
    first = load_hf(folder, layout_for(folder), Place(tp=(1, 2), pp=(0, 2)))
    assert all(torch.equal(first[name], state[name]) for name in tower)
    assert not tower & layout_for(folder).at(Place(pp=(1, 2))).keys()
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="make the layout from the checkpoint"):
        load_hf(folder, layout_for(config))


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("qwen3-moe", Place(ep=(0, 3)), "4 experts are not divisible by ep=3; use ep in {1, 2, 4}"),
        ("qwen3-moe", Place(etp=(0, 5)), "moe_intermediate_size=24 is not divisible by etp=5"),
        ("qwen3-next", Place(tp=(0, 8)), "num_attention_heads=4 is not divisible by tp=8; use tp in {1, 2, 4}"),
        ("deepseek", Place(tp=(0, 8)), "num_attention_heads=4 is not divisible by tp=8"),
    ],
)
def test_experts_and_heads_that_do_not_divide(name: str, place: Place, message: str, checkpoint: Checkpoints) -> None:
    with pytest.raises(ValueError, match=message):
        layout_for(checkpoint(name)).at(place)
