"""The text parts of vision-language models on the native backend: positions of three axes, and saved towers."""

from __future__ import annotations

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


def test_a_vision_tower_is_planned_where_the_files_show_it(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    options = MemoryOptions(ParallelDims(), 64, torch.float32)
    (planned,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    assert planned.weights == 4 * sum(parameter.numel() for parameter in model.parameters())
    (tmp_path / "model.safetensors").unlink()
    (text,) = plan_memory(tmp_path, options, role="causal_lm", trained=True)
    assert planned.weights - text.weights == 4 * sum(x.numel() for x in model.base_model.visual.parameters())
