"""The text parts of vision-language models on the native backend: positions of three axes, and saved towers."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_patches.testing import random_sequences, tiny_model
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.model import FAMILIES
from rl_models import Actor
from rl_train.planner.memory import MemoryOptions
from rl_train.planner.plan import plan_memory

VISION_LANGUAGE = [name for name, family in FAMILIES.items() if family.sections is not None]


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_positions_of_three_axes_rotate_as_in_transformers(family: str, tmp_path: Path) -> None:
    model: Any = tiny_model(family).eval()
    model.save_pretrained(tmp_path)
    sequences = random_sequences((7, 1, 12), 61)
    generator = torch.Generator().manual_seed(1)
    axes = [torch.randint(20, (3, len(ids)), generator=generator) for ids in sequences]
    packed = replace(PackedSequence.from_sequences(sequences), rotary_positions=torch.cat(axes, dim=1))
    engine: Any = Actor.from_pretrained(tmp_path, backend="parallel", device="cpu").engine
    with torch.no_grad():
        states = packed.split(engine.model(packed))
        for ids, positions, own in zip(sequences, axes, states, strict=True):
            expected = model.model.language_model(ids[None], position_ids=positions[:, None]).last_hidden_state[0]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
        # Text alone has the same position on all axes.
        plain = engine.model(replace(packed, rotary_positions=None))
        same = replace(packed, rotary_positions=packed.position_ids.expand(3, -1).contiguous())
        torch.testing.assert_close(engine.model(same), plain, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_saved_checkpoint_has_the_tower_bit_by_bit(family: str, tmp_path: Path) -> None:
    model: Any = tiny_model(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    actor = Actor.from_pretrained(tmp_path / "first", backend="parallel", device="cpu")
    actor.save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    streamed = {name: tensor.clone() for name, tensor in actor.stream_weights()}
    assert first.keys() == second.keys() == streamed.keys()
    assert len([name for name in first if "visual." in name]) > 20
    for name, tensor in first.items():
        # transformers saves Qwen3-VL-MoE's experts the other way round.
        tensor = tensor if tensor.shape == second[name].shape else tensor.transpose(1, 2)
        assert tensor.dtype == second[name].dtype == torch.bfloat16
        assert torch.equal(second[name], tensor)
        assert torch.equal(streamed[name], tensor)


def test_kimi_is_saved_under_the_names_of_its_published_files(tmp_path: Path) -> None:
    model: Any = tiny_model("kimi_k25").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for source, target in itertools.pairwise(folders):
        # The class and the text model of the published config.
        config |= {"architectures": ["KimiK25ForConditionalGeneration"]}
        config["text_config"]["model_type"] = "kimi_k2"
        (source / "config.json").write_text(json.dumps(config))
        actor = Actor.from_pretrained(source, backend="parallel", device="cpu")
        actor.save_pretrained(target)
    first, second, third = (load_file(folder / "model.safetensors") for folder in folders)
    streamed = {name: tensor.clone() for name, tensor in actor.stream_weights()}
    assert second.keys() == third.keys() == streamed.keys()
    for name, tensor in second.items():
        assert torch.equal(third[name], tensor)
        assert torch.equal(streamed[name], tensor)
    published = ["language_model.model.layers.1.mlp.experts.3.up_proj.weight", "mm_projector.pre_norm.bias"]
    published += ["vision_tower.patch_embed.proj.weight", "vision_tower.encoder.blocks.1.wqkv.weight"]
    assert {*published} <= second.keys()
    assert len(first) == len(second)
    again = type(model).from_pretrained(folders[1], dtype=torch.bfloat16)
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("family", ["kimi_k25", "qwen2_5_vl"])
def test_a_vision_tower_is_planned_where_the_files_show_it(family: str, tmp_path: Path) -> None:
    model: Any = tiny_model(family)
    model.save_pretrained(tmp_path)
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    options = MemoryOptions(ParallelDims(), 64, torch.float32)
    (planned,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    tower = model.base_model
    del tower.language_model
    assert planned.weights == 4 * stored
    (tmp_path / "model.safetensors").unlink()
    (text,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    assert planned.weights - text.weights == 4 * sum(x.numel() for x in tower.parameters())
