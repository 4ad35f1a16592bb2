"""Adapters of PEFT through the commands, and their layout at every place."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckpt
from ckpt.cli import app
from ckpt.layout import adaptable
from ckpt.layout.pieces import Box, cover_problem

Checkpoints = Callable[..., Path]
SETTINGS = {"lora_alpha": 6.0, "use_rslora": False}
BASE = "base_model_name_or_path"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})


def layout_of(folder: Path, *names: str) -> ckpt.AdapterLayout:
    base = ckpt.layout_for(folder)
    every, linear = adaptable(base)
    chosen = [name for part in every.values() for name in part if name in linear or name.endswith(names or ("-",))]
    return ckpt.AdapterLayout(base, chosen, 3, SETTINGS | {BASE: str(folder)})


def whole(layout: ckpt.AdapterLayout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = layout.at(ckpt.Place())
    return {name: torch.randn(block.shape, generator=generator) / 8 for name, block in blocks.items()}


GRIDS = [ckpt.Grid(), ckpt.Grid(tp=4), ckpt.Grid(tp=2, pp=2, ep=2), ckpt.Grid(ep=4), ckpt.Grid(ep=4, etp=2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_places_together_hold_every_adapter_once(checkpoint: Checkpoints, name: str, grid: ckpt.Grid) -> None:
    """Also with one expert on each rank, whose tensor holds that of one expert alone."""
    layout = layout_of(checkpoint(name), ".experts.gate_up_proj", ".experts.down_proj", "embed_tokens")
    boxes: dict[str, set[Box]] = {}
    for place in grid.places():
        for local, block in layout.at(place).items():
            assert local.endswith(("lora.A", "lora.B"))
            for piece in block.pieces:
                if piece.canonical_range is not None:
                    boxes.setdefault(piece.name, set()).add(piece.canonical_range)
    assert boxes.keys() == layout.canonical.keys()
    for name, held in boxes.items():
        assert cover_problem(sorted(held), layout.canonical[name].shape) is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_stack_of_experts_is_merged_as_each_expert_alone(checkpoint: Checkpoints, shared: bool) -> None:
    """Boxes of gate, up and down of the last three experts, against B A of each expert."""
    plain = layout_of(checkpoint("qwen3-moe"), ".experts.gate_up_proj", ".experts.down_proj")
    layout = ckpt.AdapterLayout(plain.base, plain.chosen, 3, plain.settings | {"shared_experts": shared})
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(entry.shape, generator=generator) for name, entry in layout.canonical.items()}
    change, layer = layout.merging(tensors), "model.layers.2.mlp.experts"
    rows, columns = slice(3, 20), slice(1, 17)
    for name, path, first in (("gate", ".base_layer", 0), ("up", ".base_layer", 24), ("down", "", 0)):
        names = [f"{layer}.{expert}.{name}_proj.weight" for expert in (1, 2, 3)]
        values = torch.randn(3, 17, 16, generator=generator)
        merged = change(names, ((3, 20), (1, 17)), values)
        down, up = (tensors[f"{layer}{path}.lora_{factor}.weight"].double() for factor in "AB")
        for expert, before, after in zip((1, 2, 3), values, merged, strict=True):
            of_A = down[3 * expert % len(down) :][:3]
            of_B = up[first:][..., expert % up.shape[-1]]
            torch.testing.assert_close(after, (before + 2 * (of_B[rows] @ of_A[:, columns])).float(), rtol=0, atol=0)
            assert not torch.equal(before, after)


def test_inspect_merge_and_verify(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    layout = layout_of(source)
    tensors = whole(layout)
    ckpt.save_adapter(tmp_path / "a", tensors, layout)
    facts = json.loads(run("inspect", tmp_path / "a", "--json").stdout)
    assert facts["kind"] == "LoRA adapter"
    assert (facts["r"], facts["tensors"]) == (3, len(layout.canonical))
    assert "LoRA adapter" in run("inspect", tmp_path / "a").stdout
    assert run("inspect", tmp_path / "a", "--check").exit_code == 0
    assert run("verify", tmp_path / "a", tmp_path / "a").exit_code == 0
    tensors["model.layers.0.self_attn.o_proj.lora.B"][1, 2] += 1
    ckpt.save_adapter(tmp_path / "b", tensors, layout)
    result = run("verify", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert "o_proj.lora_B.weight: 1 elements differ, first at [1, 2]" in result.stdout
    result = run("verify", tmp_path / "a", with_fields(tmp_path / "a", tmp_path / "pissa", init_lora_weights="pissa"))
    assert result.exit_code == 1
    assert re.search("init_lora_weights .* None and 'pissa'", result.stdout)
    result = run("verify", tmp_path / "a", source)
    assert result.exit_code == 2
    assert "is a LoRA adapter, and the other is none; merge it first" in result.stderr
    for more in ([], ["--base", source]):
        result = run("merge", tmp_path / "a", tmp_path / "merged", *more)
        assert result.exit_code == 0, result.output
    base, merged = load_file(source / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    factors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        delta = torch.zeros_like(weight)
        if f"{key}.lora_A.weight" in factors:
            delta = 2 * (factors[f"{key}.lora_B.weight"].double() @ factors[f"{key}.lora_A.weight"].double())
        assert torch.equal(merged[name], (weight.double() + delta).to(weight.dtype)), name


def with_fields(adapter: Path, out: Path, **fields: object) -> Path:
    """Copy an adapter with other fields in its config."""
    shutil.copytree(adapter, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | fields))
    return out


def test_a_layer_without_adapters_is_named(checkpoint: Checkpoints) -> None:
    base = ckpt.layout_for(checkpoint("llama"))
    with pytest.raises(ValueError, match=r"'model.norm' is no layer that can have an adapter; use names of adaptable"):
        ckpt.AdapterLayout(base, ["model.layers.0.mlp.up_proj", "model.norm"], 2, SETTINGS)
    # PEFT leaves out the output projections of Mamba-2, which kernels read as weights.
    layers, linear = adaptable(ckpt.layout_for(checkpoint("nemotron-h")))
    assert {name.rpartition(".")[2] for name in linear} >= {"in_proj", "q_proj", "up_proj"}
    assert not any(".out_proj" in name for name in (*layers, *linear))


def test_adapters_that_are_not_finite_are_not_saved(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_of(checkpoint("llama"))
    tensors = whole(layout)
    tensors["model.layers.0.self_attn.o_proj.lora.B"][1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"o_proj.lora_B.weight holds NaN or infinite values, so nothing is saved"):
        ckpt.save_adapter(tmp_path / "a", tensors, layout)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    layout = layout_of(source)
    ckpt.save_adapter(tmp_path / "a", whole(layout), layout)
    pissa = with_fields(tmp_path / "a", tmp_path / "pissa", init_lora_weights="pissa_niter_4")
    for arguments, text in (
        (("merge", source, tmp_path / "c", "--base", source), "is for adapters, and .* is none"),
        (
            ("merge", tmp_path / "a", tmp_path / "c", "--base", tmp_path / "x"),
            r"is no folder here; give the model's folder with --base \(base= in Python\)",
        ),
        (
            ("merge", tmp_path / "a", tmp_path / "c", "--base", checkpoint("qwen3-moe")),
            "does not hold adapters of rank 3",
        ),
        (("merge", tmp_path / "a", tmp_path / "c", "--format", "fp8"), "format='fp8' does not take an adapter"),
        (("merge", pissa, tmp_path / "c"), "init_lora_weights='pissa_niter_4' is not read"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert re.search(text, result.stderr), result.stderr


def test_a_base_that_is_gone_is_explained(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = ckpt.layout_for(checkpoint("llama"))
    for number, (named, text) in enumerate(
        (
            ("models/llama", "models/llama, a path relative to another working directory or a name on a hub, which is"),
            (str(tmp_path / "gone"), "gone which is no folder here; give the model's folder with --base"),
        )
    ):
        layout = ckpt.AdapterLayout(base, layout_of(checkpoint("llama")).chosen, 3, {**SETTINGS, BASE: named})
        ckpt.save_adapter(tmp_path / str(number), whole(layout), layout)
        result = run("merge", tmp_path / str(number), tmp_path / "out")
        assert result.exit_code == 2
        assert text in result.stderr
