"""The text parts of vision-language models on the native backend: positions of three axes, and towers that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from hf_patches.testing import one_by_one, random_sequences, tiny_model
from parallel_layers import PackedSequence
from parallel_layers.model import FAMILIES
from rl_models import Actor, Batch, OptimizerOptions
from rl_models.losses import LossTerms

OPTIMIZER = OptimizerOptions(learning_rate=1e-2)
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
def test_a_saved_checkpoint_keeps_the_tower_bit_by_bit(family: str, tmp_path: Path) -> None:
    model: Any = tiny_model(family)
    # A tower may have a dtype of its own.
    model.model.visual.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    before = load_file(tmp_path / "first" / "model.safetensors")
    actor = Actor.from_pretrained(tmp_path / "first", backend="parallel", device="cpu", optimizer=OPTIMIZER)
    sequences = random_sequences((7, 12), 61)
    batch = Batch.from_sequences(sequences)
    actor.update(batch, lambda log_probs, entropy, part: LossTerms(-log_probs))
    actor.save_pretrained(tmp_path / "second")
    after = load_file(tmp_path / "second" / "model.safetensors")
    streamed = {name: tensor.clone() for name, tensor in actor.stream_weights()}
    assert after.keys() == before.keys() == streamed.keys()
    tower = {name for name in before if "visual." in name}
    assert len(tower) > 20
    for name, tensor in after.items():
        assert torch.equal(tensor, streamed[name])
        if name in tower:
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, before[name])
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "second", dtype=torch.float32)
    with torch.no_grad():
        expected = one_by_one(loaded, sequences).log_probs
    found = actor.log_probs(batch).log_probs
    torch.testing.assert_close(found[~batch.first], expected[(~batch.first).roll(-1)], rtol=0, atol=1e-5)
