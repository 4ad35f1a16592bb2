from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import (
    Grid,
    layout_for,
    load_hf,
    reshard,
    save_hf,
    verify,
)
from ckpt.transfer.sources import open_source

Checkpoints = Callable[..., Path]
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


def changed(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any], **options: Any) -> Path:
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    edit(tensors)
    save_hf(target, tensors, layout, **options)
    return target


def test_the_same_tensors_in_other_files_are_equal(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    other = changed(source, tmp_path / "b", lambda tensors: None, max_shard_size="20KB")
    report = verify(source, other)
    assert report.equal
    assert report.tensors == 21
    reshard(source, tmp_path / "c", Grid(tp=2, pp=2), target="megatron")
    assert verify(tmp_path / "c", other).equal


@pytest.mark.parametrize("chunk", [331, 1 << 20])
def test_first_and_worst_differences_are_named(
    chunk: int, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.comparison.compare._CHUNK_ELEMENTS", chunk)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN][5, 7] += 0.25
        tensors[DOWN][9, 1] -= 0.5
        tensors[NORM][3] += 2

    report = verify(checkpoint("llama"), changed(checkpoint("llama"), tmp_path / "b", edit))
    assert [difference.name for difference in report.differences] == [DOWN, NORM]
    first = report.differences[0]
    assert first.first == (5, 7)
    assert first.elements == 2
    assert first.worst == pytest.approx(0.5, rel=1e-5)
    assert report.worst is not None
    assert report.worst.name == NORM


def test_bits_are_compared_unless_a_tolerance_is_given(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def zero(value: float) -> Callable[[dict[str, Tensor]], None]:
        return lambda tensors: tensors[NORM].fill_(value)

    plus = changed(checkpoint("llama"), tmp_path / "plus", zero(0.0))
    minus = changed(checkpoint("llama"), tmp_path / "minus", zero(-0.0))
    assert [(d.name, d.elements, d.worst) for d in verify(plus, minus).differences] == [(NORM, 32, 0.0)]
    assert verify(plus, minus, atol=1e-9).equal
    nan = tmp_path / "nan"
    shutil.copytree(plus, nan)
    stored = load_file(nan / "model.safetensors")
    zero(math.nan)(stored)
    save_file(stored, nan / "model.safetensors")
    assert verify(nan, nan).equal
    assert verify(nan, nan, rtol=1e-3).equal
    report = verify(plus, nan, atol=1.0)
    assert report.worst is not None
    assert report.worst.worst == math.inf
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["differences"][0]["worst"] is None


def test_a_tolerance_is_kept_per_element(checkpoint: Checkpoints, tmp_path: Path) -> None:
    other = changed(checkpoint("llama"), tmp_path / "b", lambda tensors: tensors[NORM].mul_(1 + 1e-4))
    assert verify(checkpoint("llama"), other, rtol=2e-4).equal
    assert not verify(checkpoint("llama"), other, rtol=0.5e-4).equal


def test_types_keys_and_shapes_are_compared(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    half = changed(source, tmp_path / "half", lambda tensors: None, dtype=torch.bfloat16)
    report = verify(source, half)
    assert {difference.kind for difference in report.differences} == {"dtype", "values"}
    assert verify(source, half, dtypes=False, rtol=1e-2).equal
    tied = verify(source, checkpoint("llama-tied"))
    assert [(d.name, d.kind) for d in tied.differences if d.kind != "values"] == [("lm_head.weight", "missing")]
    wide = verify(source, checkpoint("llama", vocab_size=51))
    assert ("model.embed_tokens.weight", "shape") in [(d.name, d.kind) for d in wide.differences]


@pytest.mark.parametrize("reference", ["hugging face", pytest.param("sharded", marks=pytest.mark.slow)])
def test_one_flipped_bit_is_found_in_every_ranks_copy(reference: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen2")  # two key-value heads: on four ranks each lies twice
    for name in ("a", "b"):
        reshard(source, tmp_path / name, Grid(tp=4))
    against = source if reference == "hugging face" else tmp_path / "a"
    shards = open_source(tmp_path / "b")
    for rank in range(4):
        for local in (NORM, "model.layers.0.self_attn.qkv_proj.bias"):
            path, info = shards.tensors[f"{rank}:{local}"]
            with open(path, "r+b") as file:
                file.seek(info.offset + info.nbytes - 1)
                last = file.read(1)
                file.seek(info.offset + info.nbytes - 1)
                file.write(bytes([last[0] ^ 1]))
                file.flush()
                report = verify(against, tmp_path / "b")
                file.seek(info.offset + info.nbytes - 1)
                file.write(last)
            assert not report.equal, (rank, local)
            assert all(difference.kind == "values" for difference in report.differences)
    assert verify(against, tmp_path / "b").equal


def configured(source: Path, target: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    edit(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def old_rope(config: dict[str, Any], theta: float, scaling: dict[str, Any] | None) -> None:
    config.pop("rope_parameters")
    config |= {"rope_theta": theta, "rope_scaling": scaling}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FIELDS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "rope_parameters": ("rope_theta", lambda c: c["rope_parameters"].update(rope_theta=5e5)),
    "rope_theta": ("rope_theta", lambda c: old_rope(c, 5e5, None)),
    "rope_scaling": ("rope_type", lambda c: old_rope(c, 1e4, LLAMA3)),
    "rms_norm_eps": ("rms_norm_eps", lambda c: c.update(rms_norm_eps=1e-5)),
    "hidden_act": ("hidden_act", lambda c: c.update(hidden_act="gelu")),
    "model_type": ("model_type", lambda c: c.update(model_type="mistral", architectures=["MistralForCausalLM"])),
}


@pytest.mark.parametrize("field", FIELDS)
def test_the_same_tensors_under_another_configuration_differ(
    field: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    name, edit = FIELDS[field]
    other = configured(source, tmp_path / "b", edit)
    for a, b in ((source, other), (other, source)):
        report = verify(a, b)
        assert [(item.name, item.kind) for item in report.differences] == [(f"config.json {name}", "config")]
    reshard(other, tmp_path / "shards", Grid(tp=2))
    assert verify(tmp_path / "shards", other).equal
    assert not verify(source, tmp_path / "shards").equal


def test_the_windows_and_heads_of_equal_tensors_are_compared(checkpoint: Checkpoints, tmp_path: Path) -> None:
    mistral, wide = checkpoint("mistral"), {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    for name, change in (("sliding_window", {"sliding_window": None}), ("num_attention_heads", wide)):
        report = verify(mistral, configured(mistral, tmp_path / name, lambda c, change=change: c.update(change)))
        assert f"config.json {name}" in {item.name for item in report.differences}
    tower = configured(checkpoint("qwen2-vl"), tmp_path / "vl", lambda c: c["vision_config"].update(hidden_act="relu"))
    (difference,) = verify(checkpoint("qwen2-vl"), tower).differences
    assert difference.name == "config.json vision_config.hidden_act"


def test_two_spellings_of_one_configuration_are_the_same(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        old_rope(config, 10000, None)
        for name in ("initializer_range", "use_cache", "transformers_version", "dtype"):
            config.pop(name, None)
        config |= {"torch_dtype": "float32", "use_cache": False, "attention_dropout": 0.5, "rms_norm_eps": 0.000001}

    assert verify(checkpoint("llama"), configured(checkpoint("llama"), tmp_path / "b", edit)).equal

    def unused(config: dict[str, Any]) -> None:
        config |= {"sliding_window": 131072, "use_sliding_window": False}

    assert verify(checkpoint("qwen2"), configured(checkpoint("qwen2"), tmp_path / "c", unused)).equal
