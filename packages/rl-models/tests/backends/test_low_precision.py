"""A checkpoint in FP8 is the model of its values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch


def in_fp8(folder: Path, out: Path) -> tuple[Path, Path]:
    """The checkpoint with projections in FP8 by blocks of 16 x 16, and one of the values."""
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    low, plain = load_file(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in [name for name in low if name.endswith("_proj.weight")]:
        rows, columns = low[name].shape
        scale = torch.rand(rows // 16, columns // 16) + 0.5
        wide = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        low[name], low[name + "_scale_inv"] = low[name].to(torch.float8_e4m3fn), scale
        plain[name] = low[name].float() * wide
    for kind, tensors, fields in (("low", low, {"quantization_config": quantization}), ("plain", plain, {})):
        shutil.copytree(folder, out / kind)
        save_file(tensors, out / kind / "model.safetensors")
        (out / kind / "config.json").write_text(json.dumps(config | fields))
    return out / "low", out / "plain"


def log_probs(group: ProcessGroup, path: Path, dims: ParallelDims) -> Tensor:
    actor: Any = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu")
    batch = Batch.from_sequences([torch.arange(9) % 61, torch.arange(5) + 20])
    result: Tensor = actor.log_probs(batch).log_probs
    return result


def test_the_native_actor_loads_the_values_on_any_grid(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    low, plain = in_fp8(tiny("llama"), tmp_path)
    for dims in (ParallelDims(tp=2), ParallelDims(pp=2)):
        found, expected = (ranks.run(log_probs, path, dims, world=2) for path in (low, plain))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"holds weights in fp8, which backend='transformers' does not train; `ckpt"):
        Actor.from_pretrained(low, backend="transformers", device="cpu")


def streamed(group: ProcessGroup, path: Path) -> dict[str, Tensor]:
    dims = ParallelDims(tp=2)
    actor: Any = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu")
    weights = actor.stream_weights(to=[0], dtype=torch.bfloat16, format="fp8")
    return {name: tensor.clone() for name, tensor in weights}


def test_weights_are_streamed_in_fp8(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    first, second = ranks.run(streamed, tiny("llama"), world=2)
    assert not second
    assert first["model.norm.weight"].dtype == torch.bfloat16
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert first[name].dtype == torch.float8_e4m3fn
        assert first[name + "_scale_inv"].dtype == torch.float32
