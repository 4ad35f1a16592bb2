"""Vision towers: both spellings of their names, the ties of their configs, and what of them cannot be carried."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ckpt import Grid, layout_for, load_hf, merge, reshard, save_hf, verify
from ckpt.cli import app

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
VISION = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"]
MIXTURES = ["qwen3-vl-moe", "glm4v-moe", "kimi-k2.5"]


# Of the families whose files have one prefix, one is enough for the quick run.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3-vl" else pytest.mark.slow) for name in VISION]
)
def test_both_spellings_are_one_model_saved_as_transformers_saves_it(
    name: str, checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    saved, in_memory = checkpoint(name), checkpoint(name, save_original_format=False)
    spelled = tmp_path / "spelled"
    shutil.copytree(saved, spelled)
    old, new = ("model.visual.", "visual.") if name in ("qwen3-vl", "glm4v") else ("visual.", "model.visual.")
    tensors = {
        key.replace(old, new, 1) if key.startswith(old) else key: tensor for key, tensor in read_all(saved).items()
    }
    assert tensors.keys() != read_all(saved).keys()
    save_file(tensors, spelled / "model.safetensors", {"format": "pt"})
    for other in (in_memory, spelled):
        assert verify(saved, other).equal
        assert verify(other, saved).equal
        layout = layout_for(other)
        assert layout.fingerprint == layout_for(saved).fingerprint
        assert_same(load_hf(saved, layout), load_hf(other, layout))
        save_hf(tmp_path / "out", load_hf(saved, layout), layout)
        assert_same(read_all(tmp_path / "out"), read_all(saved))
        reshard(other, tmp_path / "shards", Grid(tp=2, pp=2))
        merge(tmp_path / "shards", tmp_path / "out")
        assert_same(read_all(tmp_path / "out"), read_all(saved))


# The quick run has every tower lost as a whole, and one lost in part.
@pytest.mark.parametrize(
    ("name", "lost"),
    [
        pytest.param(
            name,
            lost,
            marks=() if name == "qwen3-vl" or (name in VISION and lost == "tower") else pytest.mark.slow,
        )
        for lost in ("tower", "block", "tensor")
        for name in (*VISION, *MIXTURES)
    ],
)
def test_a_tower_that_is_not_whole_passes_nowhere(
    name: str, lost: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    vision = json.loads((checkpoint(name) / "config.json").read_text())["vision_config"]
    two_blocks = {**vision, "num_hidden_layers" if name.startswith("kimi") else "depth": 2} | (
        {"deepstack_visual_indexes": [0, 1]} if name.startswith("qwen3-vl") else {}
    )
    whole, partial = checkpoint(name, vision_config=two_blocks), tmp_path / "partial"
    shutil.copytree(whole, partial)
    tensors = load_file(whole / "model.safetensors")
    tower = [key for key in tensors if key.split(".")[0] in ("vision_tower", "mm_projector") or "visual." in key]
    gone = {"tower": tower, "block": [key for key in tower if ".1." in key], "tensor": [tower[-1]]}[lost]
    save_file({key: tensors[key] for key in tensors if key not in gone}, partial / "model.safetensors")
    for step in (
        lambda: load_hf(partial, layout_for(partial)),
        lambda: reshard(partial, tmp_path / "out", Grid(tp=2)),
        lambda: merge(partial, tmp_path / "out"),
        lambda: verify(whole, partial),
        lambda: verify(partial, partial),
    ):
        with pytest.raises(
            ValueError, match=r"missing: (model\.)?(visual|vision_tower)\..*; download the whole checkpoint"
        ) as caught:
            step()
        assert any(key in str(caught.value) for key in gone)
    result = CliRunner().invoke(app, ["inspect", str(partial)])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
    # The same of a sharded folder, whose layout.json names the tower.
    reshard(whole, tmp_path / "shards", Grid(tp=2))
    facts = json.loads((tmp_path / "shards" / "layout.json").read_text())
    facts["carried"] = {key: shape for key, shape in facts["carried"].items() if key not in gone}
    (tmp_path / "shards" / "layout.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"layout.json: \d+ tensors of the vision tower are not in it"):
        verify(whole, tmp_path / "shards")


@pytest.mark.parametrize("depth", [-1, 1.5, "2", 10**18, True])
def test_a_depth_that_is_no_count_is_refused(depth: Any, checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen2-vl"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["depth"] = depth
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"vision_config depth=.* must be a count, or a list"):
        load_hf(tmp_path, layout_for(tmp_path))


def test_a_tensor_without_elements_is_named_with_its_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen2-vl"), tmp_path, dirs_exist_ok=True)
    tensors = {**load_file(tmp_path / "model.safetensors"), "visual.empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"visual.empty has shape \(0, 4\) in model.safetensors, no elements.*without"):
        load_hf(tmp_path, layout_for(tmp_path))


def test_the_types_of_both_parts_are_recorded(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("qwen2-vl"), source)
    config = json.loads((source / "config.json").read_text())
    parts = ("text_config", "vision_config")
    (source / "config.json").write_text(
        json.dumps({**config, **{part: {**config[part], "dtype": "float32"} for part in parts}})
    )
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    save_hf(tmp_path / "cast", tensors, layout, dtype=torch.bfloat16)
    text = {name: tensor if "visual" in name else tensor.half() for name, tensor in tensors.items()}
    save_hf(tmp_path / "mixed", text, layout)
    for folder, types in (("cast", ["bfloat16"] * 2), ("mixed", ["float16", "float32"])):
        saved = json.loads((tmp_path / folder / "config.json").read_text())
        assert [saved[part]["dtype"] for part in parts] == types
