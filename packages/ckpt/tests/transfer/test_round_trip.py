"""Loading, resharding and saving are inverse: over random shapes, grids, targets and layer placements.

Live ranks stream weights and moments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import Grid, Layout, Place, layout_for, load_hf, merge, reshard, save_hf, stream_hf

AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
# A run with --slow draws more examples.
MORE = 5 if "--slow" in sys.argv else 1
MOMENTS = {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
SLOTS = ("weights", *MOMENTS)
TARGETS = ("parallel", "megatron", "megatron_te")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "apertus": "ApertusForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(sorted(ARCHITECTURES)))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": draw(st.integers(1, 9)),
        # Megatron-Core splits the fused rows of queries, keys and values evenly, through a single group as well.
        "head_dim": draw(st.integers(1, 4) if kv_heads > 1 else st.sampled_from([2, 4])),
        "num_attention_heads": kv_heads * draw(st.sampled_from([4, 8])) // math.gcd(kv_heads, 4),
        "num_key_value_heads": kv_heads,
        "intermediate_size": 4 * draw(st.integers(1, 4)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "vocab_size": draw(st.integers(2, 13)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family in ("llama", "qwen3", "apertus"):
        config["attention_bias"] = draw(st.booleans())
    if family in ("qwen3_moe", "deepseek_v3"):
        config["moe_intermediate_size"] = 4 * draw(st.integers(1, 3))
    if family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        config["num_experts"] = draw(st.sampled_from([2, 4]))
    if family == "deepseek_v3":
        config |= {name: draw(st.integers(1, 5)) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")}
        config |= {"q_lora_rank": draw(st.sampled_from([None, 4, 8])), "kv_lora_rank": 4 * draw(st.integers(1, 2))}
        # The rows of the compressed keys and values are split over tp on Megatron's local spec.
        config["qk_rope_head_dim"] = 4
        config["n_shared_experts"] = draw(st.integers(1, 2))
        config["first_k_dense_replace"] = draw(st.integers(0, 2))
        config["num_key_value_heads"] = config["num_attention_heads"]
        config["num_nextn_predict_layers"] = draw(st.integers(0, 2))
    return config


@st.composite
def grids(draw: st.DrawFn, config: dict[str, Any]) -> tuple[Grid, Any]:
    """A grid that fits the config, and a placement of its layers."""
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    experts = config.get("num_experts", 0)
    grid = Grid(
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=pp,
        vpp=vpp,
        ep=draw(st.sampled_from([1, 2])) if experts else 1,
        etp=draw(st.sampled_from([None, 1, 2])) if experts else None,
    )
    cuts = sorted(
        draw(st.lists(st.integers(0, config["num_hidden_layers"]), min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    )
    edges = [0, *cuts, config["num_hidden_layers"]]
    explicit = [edges[i + 1] - edges[i] for i in range(pp * vpp)]
    by_cost = [None] if config["num_hidden_layers"] >= pp * vpp else []
    return grid, draw(st.sampled_from([*by_cost, explicit]))


def places_and_tensors(folder: Path, layout: Layout, grid: Grid) -> tuple[list[Any], list[dict[str, Tensor]]]:
    places = list(grid.places())
    return places, [load_hf(folder, layout, place) for place in places]


@settings(max_examples=10 * MORE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_load_and_save_are_inverse_on_any_grid(data: st.DataObject) -> None:
    config = data.draw(configs())
    torch.manual_seed(0)
    predicting = config.get("num_nextn_predict_layers", 0)
    whole = dataclasses.replace(layout_for(config), prediction_layers=predicting)
    state = {name: torch.randn(tensor.shape) for name, tensor in whole.canonical.items()}
    targets = TARGETS[:1] if predicting else TARGETS
    with tempfile.TemporaryDirectory() as folder:
        first, second, third = (Path(folder) / name for name in ("a", "b", "c"))
        first.mkdir()
        save_file(state, first / "model.safetensors")
        (first / "config.json").write_text(json.dumps(config))
        for source, destination in ((first, second), (second, third)):
            grid, layers = data.draw(grids(config))
            layout = layout_for(
                source, data.draw(st.sampled_from(targets)), layers=layers, vocab_multiple=data.draw(st.integers(1, 3))
            )
            places, tensors = places_and_tensors(source, layout, grid)
            for place, held in zip(places, tensors, strict=True):
                for name, block in layout.at(place).items():
                    for piece in block.pieces:
                        if piece.is_padding:
                            assert not held[name][tuple(slice(a, b) for a, b in piece.local_range)].any()
            save_hf(destination, tensors, layout, places)
            saved = load_file(destination / "model.safetensors")
            assert saved.keys() == state.keys()
            assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())


def write_run(folder: Path, config: dict[str, Any], role: Any) -> None:
    """A model in `weights`, and each of its moments in a folder of its own, as if it were a model, too."""
    torch.manual_seed(0)
    canonical = layout_for(config, role=role).canonical
    for slot, dtype in {"weights": torch.float32, **MOMENTS}.items():
        (folder / slot).mkdir()
        state = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in canonical.items()}
        save_file(state, folder / slot / "model.safetensors")
        (folder / slot / "config.json").write_text(json.dumps(config))


def held_at(folder: Path, layout: Layout, place: Place) -> dict[str, dict[str, Tensor]]:
    """Return a place's weights and moments, read from the Hugging Face files."""
    return {slot: load_hf(folder / slot, layout, place) for slot in SLOTS}


def layout_on(data: st.DataObject, config: dict[str, Any], role: Any, layers: Any) -> Layout:
    target, multiple = data.draw(st.sampled_from(TARGETS)), data.draw(st.integers(1, 3))
    return layout_for(config, target, role, layers=layers, vocab_multiple=multiple)


@settings(max_examples=3 * MORE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_files_go_from_any_grid_to_any_other(assert_same: AssertSame, data: st.DataObject) -> None:
    config, role = data.draw(configs()), data.draw(st.sampled_from(["causal_lm", "value"]))
    if role == "value":
        config["architectures"] = [config["architectures"][0].replace("CausalLM", "TokenClassification")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, config, role)
        reshard(folder / "weights", folder / "0", Grid())
        for number in (1, 2):
            grid, layers = data.draw(grids(config))
            layout = layout_on(data, config, role, layers)
            reshard(
                folder / f"{number - 1}",
                folder / f"{number}",
                grid,
                target=layout.target,
                layers=layers,
                vocab_multiple=layout.vocab_multiple,
            )
            for place in grid.places():
                assert_same(load_hf(folder / f"{number}", layout, place), load_hf(folder / "weights", layout, place))
        merge(folder / "2", folder / "merged")
        assert_same(load_file(folder / "merged" / "model.safetensors"), load_file(folder / "weights/model.safetensors"))


def stream(group: Any, folder: str, layout: Layout, grid: Grid) -> Any:
    """Stream the weights and the moments of a grid with several places on a rank, or none."""
    places = list(grid.places())[group.rank() :: group.size()]
    held = [held_at(Path(folder), layout, place) for place in places]
    return {slot: dict(stream_hf([chunk[slot] for chunk in held], layout, group, places)) for slot in SLOTS}


@settings(max_examples=3 * MORE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_live_ranks_of_any_grid_stream_weights_and_moments(
    assert_same: AssertSame, ranks: Any, data: st.DataObject
) -> None:
    config, role = data.draw(configs()), data.draw(st.sampled_from(["causal_lm", "value"]))
    grid, layers = data.draw(grids(config))
    layout = layout_on(data, config, role, layers)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), config, role)
        for streamed in ranks.run(stream, folder, layout, grid, world=4):
            for slot, tensors in streamed.items():
                assert_same(tensors, load_file(f"{folder}/{slot}/model.safetensors"))
