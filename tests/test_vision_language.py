"""The text parts of vision-language models on the native backend: positions of three axes, and saved towers."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from ckpt import layout_for, load_hf
from hf_patches.testing import random_sequences, tiny_config, tiny_model
from parallel_layers import ModelConfig, PackedSequence, ParallelDims
from parallel_layers.model import FAMILIES
from rl_models import Actor
from rl_train.planner import MemoryOptions, plan_memory

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


def test_a_tower_under_the_names_in_memory_is_named_with_the_fix(tmp_path: Path) -> None:
    """Kimi's tower has other names and fused projections in memory; the fix saves the published ones."""
    model = tiny_model("kimi_k25").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    reported = r"unexpected: model.vision_tower.*names that transformers has in memory .* with the same weights: (.*)"
    with pytest.raises(ValueError, match=reported) as error:
        load_hf(tmp_path / "memory", layout_for(tmp_path / "memory"))
    fix = re.search(reported, str(error.value))[1]  # type: ignore[index]
    exec(fix.replace("OUT", str(tmp_path / "again")), {})
    model.save_pretrained(tmp_path / "trained")
    # What transformers reads, it may keep wider: since 5.24 the router of a mixture is in fp32.
    type(model).from_pretrained(tmp_path / "trained").save_pretrained(tmp_path / "published")
    again, published = (load_hf(tmp_path / name, layout_for(tmp_path / name)) for name in ("again", "published"))
    assert all(torch.equal(again[name], tensor) for name, tensor in published.items())
    assert all(again[name].dtype == tensor.dtype for name, tensor in published.items())
    assert again.keys() == published.keys()


@pytest.mark.parametrize("family", ["kimi_k25", "qwen2_5_vl"])
def test_a_vision_tower_is_planned_where_the_files_show_it(family: str, tmp_path: Path) -> None:
    model: Any = tiny_model(family)
    model.save_pretrained(tmp_path)
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    options = MemoryOptions(dims=ParallelDims(), tokens=64, dtype=torch.float32)
    (planned,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    tower = model.base_model
    del tower.language_model
    assert planned.weights == 4 * stored
    (tmp_path / "model.safetensors").unlink()
    (text,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    assert planned.weights - text.weights == 4 * sum(x.numel() for x in tower.parameters())


def with_ties(plain: dict[str, Any], outer: bool | None, inner: bool | None) -> dict[str, Any]:
    said: list[Any] = [{} if tie is None else {"tie_word_embeddings": tie} for tie in (outer, inner)]
    return {**plain, **said[0], "text_config": {**plain["text_config"], **said[1]}}


@pytest.mark.families("family")
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.has_vision])
def test_ties_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    plain = json.loads(tiny_config(family).to_json_string())
    plain.pop("tie_word_embeddings", None)
    plain["text_config"].pop("tie_word_embeddings", None)
    for outer, inner in itertools.product((None, False, True), repeat=2):
        config = with_ties(plain, outer, inner)
        (tmp_path / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            made: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
        tied = made.get_output_embeddings().weight is made.get_input_embeddings().weight
        if family == "mistral3" and outer is None:
            tied = bool(inner)  # see below
        assert layout_for(config).tied == ModelConfig.from_hf(config).tie_word_embeddings == tied, (outer, inner)


def test_a_published_mistral_3_has_its_own_head(tmp_path: Path) -> None:
    """These files hold a head, and only their text_config may say so; transformers ties by the config, then warns."""
    model: Any = tiny_model("mistral3", tie_word_embeddings=False)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.flip(model.lm_head.weight.detach(), [0]))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    head, layout = loaded.get_output_embeddings().weight, layout_for(tmp_path)
    assert loaded.config.tie_word_embeddings
    assert not torch.equal(head, loaded.get_input_embeddings().weight)
    assert torch.equal(load_hf(tmp_path, layout)["lm_head.weight"], head)
