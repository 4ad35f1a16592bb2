"""Multi-token-prediction layers go wherever the weights go: loads, saves, streams, conversions and plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from ckpt import (
    Grid,
    Layout,
    Place,
    layout_for,
    load_hf,
    load_training,
    merge,
    reshard,
    save_hf,
    save_training,
    stream_hf,
    verify,
)
from ckpt.cli import app

AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
# The tiny models have 3 layers.
MTP = "model.layers.3."
OWN = {"enorm.weight": (32,), "hnorm.weight": (32,), "eh_proj.weight": (32, 64), "shared_head.norm.weight": (32,)}
COPIES = {
    f"{MTP}embed_tokens.weight": "model.embed_tokens.weight",
    f"{MTP}shared_head.head.weight": "lm_head.weight",
}


@pytest.fixture(scope="session")
def predicting(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`predicting("deepseek")`: the model's folder with a multi-token-prediction layer, like its last layer."""

    def make(name: str, *, copies: bool = True) -> Path:
        folder, out = checkpoint(name), tmp_path_factory.mktemp("mtp")
        state = load_file(folder / "model.safetensors")
        torch.manual_seed(1)
        last = {key: value for key, value in state.items() if key.startswith("model.layers.2.")}
        state |= {MTP + key.removeprefix("model.layers.2."): torch.randn_like(value) for key, value in last.items()}
        state |= {MTP + key: torch.randn(shape) for key, shape in OWN.items()}
        state |= {key: state[source].clone() for key, source in COPIES.items() if copies}
        save_file(state, out / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        return out

    return make


def carry(group: ProcessGroup, folder: Path, layout: Layout, places: list[Place], out: Path) -> dict[str, Tensor]:
    """Load, save and stream this rank's part; return the stream."""
    place = places[group.rank()]
    tensors = load_hf(folder, layout, place, group=group)
    save_hf(out, tensors, layout, place, group=group)
    return dict(stream_hf(tensors, layout, group, place))


SLOW = [pytest.param(grid, marks=pytest.mark.slow) for grid in (Grid(tp=2), Grid(pp=2), Grid(tp=2, ep=2))]


@pytest.mark.parametrize("grid", [Grid(ep=2), Grid(tp=2, pp=2), *SLOW], ids=str)
def test_ranks_load_save_and_stream_them_bit_for_bit(
    ranks: Any, predicting: Callable[..., Path], assert_same: AssertSame, tmp_path: Path, grid: Grid
) -> None:
    folder = predicting("deepseek")
    state = load_file(folder / "model.safetensors")
    layout = layout_for(folder)
    assert layout.prediction_layers == 1
    streams = ranks.run(carry, folder, layout, [*grid.places()], tmp_path / "out", world=grid.size)
    for streamed in streams:
        assert_same(streamed, state)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    # Layers and head lie on the last stage; the copy of the embedding is where the embedding is.
    first, last = (layout.at(Place(pp=(stage, 2))) for stage in (0, 1))
    assert [name for name in first if name.startswith("mtp.")] == ["mtp.layers.3.embed_tokens.weight"]
    assert {f"mtp.layers.3.{name}" for name in (*OWN, "shared_head.head.weight")} <= last.keys()


@pytest.mark.parametrize(
    "name",
    [
        "glm4-moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek", "deepseek-no-q-lora", "glm4-moe-lite")),
    ],
)
def test_commands_carry_them_over_grids(
    name: str, predicting: Callable[..., Path], assert_same: AssertSame, tmp_path: Path
) -> None:
    folder = predicting(name)
    reshard(folder, tmp_path / "a", Grid(tp=2, pp=2, ep=2, etp=1))
    reshard(tmp_path / "a", tmp_path / "b", Grid(tp=4, pp=3))
    merge(tmp_path / "b", tmp_path / "merged")
    assert_same(load_file(tmp_path / "merged" / "model.safetensors"), load_file(folder / "model.safetensors"))
    assert verify(folder, tmp_path / "b").equal
    # On Megatron-Core they are left out, and said to be.
    with pytest.warns(UserWarning, match="target='megatron' holds no multi-token-prediction layers: the 1 of"):
        reshard(folder, tmp_path / "m", Grid(), target="megatron")
    merge(tmp_path / "m", tmp_path / "without")
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    lost = {item.name for item in verify(folder, tmp_path / "without").differences if item.kind == "missing"}
    assert lost == {key for key in load_file(folder / "model.safetensors") if key.startswith(MTP)}


def test_a_model_shares_embedding_and_head_with_them(predicting: Callable[..., Path], tmp_path: Path) -> None:
    """Files without the copies are the same model; `plan` counts shared tensors once, and fp8 leaves `eh_proj`."""
    folder, short = predicting("deepseek"), predicting("deepseek", copies=False)
    assert verify(folder, short).equal
    (shown,) = json.loads(CliRunner().invoke(app, ["plan", str(folder), "--json"]).stdout)
    state = load_file(folder / "model.safetensors")
    assert shown["bytes"] == sum(tensor.nbytes for name, tensor in state.items() if name not in COPIES)
    own = sum(tensor.nbytes for name, tensor in state.items() if name.startswith(MTP) and name not in COPIES)
    assert shown["components"]["mtp"] == own
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text((folder / "config.json").read_text())
    (config_alone,) = json.loads(CliRunner().invoke(app, ["plan", str(tmp_path / "alone"), "--json"]).stdout)
    assert config_alone["components"] == shown["components"]
    # Where they are computed, the last stage holds the embedding, too.
    layout = dataclasses.replace(layout_for(folder), predicts=True)
    assert layout.at(Place(pp=(1, 2)))["mtp.embed_tokens.weight"].names == ("model.embed_tokens.weight",)
    assert "mtp.embed_tokens.weight" not in layout.at(Place())
    merge(folder, tmp_path / "fp8", format="fp8")
    listed = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {f"{MTP}eh_proj", f"{MTP}embed_tokens", f"{MTP}shared_head.head"} <= {*listed}
    assert f"{MTP}self_attn.o_proj" not in listed


def test_training_checkpoints_hold_them(
    predicting: Callable[..., Path], assert_same: AssertSame, tmp_path: Path
) -> None:
    folder = predicting("glm4-moe")
    layout = layout_for(folder)
    tensors = load_hf(folder, layout)
    save_training(tmp_path / "run", 0, tensors, layout)
    other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_training(tmp_path / "run", layout, into=other)
    assert_same(other, tensors)
    shown = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--json"]).stdout)
    assert shown["tensors"] == len(load_file(folder / "model.safetensors"))


def test_a_part_of_them_is_refused_and_none_is_allowed(
    checkpoint: Callable[..., Path], predicting: Callable[..., Path], tmp_path: Path
) -> None:
    folder = predicting("deepseek")
    state = load_file(folder / "model.safetensors")
    for name, keep in {"cut": lambda key: key != f"{MTP}hnorm.weight", "none": lambda key: MTP not in key}.items():
        (tmp_path / name).mkdir()
        save_file({key: value for key, value in state.items() if keep(key)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"missing: model.layers.3.hnorm.weight"):
        load_hf(tmp_path / "cut", layout_for(tmp_path / "cut"))
    # transformers saves the count without the layers, which a critic and a layout of the config alone leave out.
    for layout in (
        layout_for(tmp_path / "none"),
        layout_for(folder, role="value"),
        layout_for(json.loads((folder / "config.json").read_text())),
    ):
        assert not layout.prediction_layers
        assert not any(name.startswith("mtp.") for name in load_hf(folder, layout))
    other = dict(json.loads((folder / "config.json").read_text()), num_nextn_predict_layers=0)
    (tmp_path / "none" / "config.json").write_text(json.dumps(other))
    save_file(state, tmp_path / "none" / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: model.layers.3."):
        load_hf(tmp_path / "none", layout_for(tmp_path / "none"))


QWEN = {"mtp.pre_fc_norm_embedding": (32,), "mtp.pre_fc_norm_hidden": (32,), "mtp.fc": (32, 64), "mtp.norm": (32,)}


@pytest.mark.parametrize("name", ["qwen3-next", pytest.param("qwen3.5-moe-vl", marks=pytest.mark.slow)])
def test_the_layer_of_qwen_has_names_of_its_own(
    name: str, checkpoint: Callable[..., Path], assert_same: AssertSame, tmp_path: Path
) -> None:
    """The config need not count it; published files stack its experts, as transformers does in memory."""
    files, separate = {}, checkpoint(name)
    for form in ("stacked", "separate"):
        folder = checkpoint(name, save_original_format=form == "separate")
        state = load_file(folder / "model.safetensors")
        last = {key.split("layers.2.")[1]: tensor for key, tensor in state.items() if ".layers.2." in key}
        torch.manual_seed(1)
        files[form] = state | {f"mtp.layers.0.{key}": tensor + 1 for key, tensor in last.items()}
        files[form] |= {f"{key}.weight": torch.randn(shape) for key, shape in QWEN.items()}
        (tmp_path / form).mkdir()
        save_file(files[form], tmp_path / form / "model.safetensors")
        (tmp_path / form / "config.json").write_text((separate / "config.json").read_text())
    layout = layout_for(tmp_path / "stacked")
    assert layout.prediction_layers == 1
    tensors = load_hf(tmp_path / "stacked", layout)
    assert {f"mtp.layers.3.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= {*tensors}
    assert "mtp.layers.3.self_attn.qkv_proj.weight" in tensors
    reshard(tmp_path / "stacked", tmp_path / "a", Grid(tp=2, pp=2, ep=2, etp=1))
    reshard(tmp_path / "a", tmp_path / "b", Grid(tp=4, pp=3))
    merge(tmp_path / "b", tmp_path / "merged")
    assert_same(load_file(tmp_path / "merged" / "model.safetensors"), files["separate"])
    # Files without the layer, and models that cannot have it.
    assert not layout_for(separate).prediction_layers
    for role in ("causal_lm", "value"):
        without = dataclasses.replace(layout_for(separate, role=role), carried=layout.carried)
        assert not any(key.startswith("mtp.") for key in load_hf(tmp_path / "separate", without))
