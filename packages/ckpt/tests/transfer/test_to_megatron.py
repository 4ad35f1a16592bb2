"""Conversions to Megatron-Core's `torch_dist` and back, without Megatron-Core, which reads them in the root's tests."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ckpt import Grid, Place, layout_for, load_hf, merge, reshard, save_hf, to_megatron, verify
from ckpt.cli import app
from ckpt.files.torch_dist import read_index
from ckpt.transfer.sources import open_source

Checkpoints = Callable[..., Path]

# Megatron-Core has no tensors of these; see test_entries.py.
NAMES = (
    "llama",
    "llama-bias",
    "qwen2-tied",
    "qwen3-moe",
    "mixtral",
    "olmo2",
    "deepseek",
    "glm4-moe",
    "gpt-oss",
    "qwen3-vl",
)
GRIDS = (Grid(), Grid(tp=2), Grid(pp=2), Grid(tp=2, pp=2))
EXPERT_GRIDS = (Grid(ep=2), Grid(tp=2, ep=2, etp=1))
MIXTURES = ("qwen3-moe", "mixtral", "deepseek", "glm4-moe", "gpt-oss")
# In a plain run each of the first models on one grid; `test_entries.py` has the layouts of all.
QUICK = {*zip(NAMES[:4], itertools.cycle((*GRIDS, *EXPERT_GRIDS)), strict=False)}
CASES = [
    pytest.param(name, grid, id=f"{name}-{grid}", marks=() if (name, grid) in QUICK else pytest.mark.slow)
    for name in NAMES
    for grid in (*GRIDS, *(EXPERT_GRIDS if name in MIXTURES else ()))
]


def stored(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor, read by torch."""
    index = read_index(folder / "release")
    tensors = {name: torch.full(entry.shape, -1.0, dtype=entry.dtype) for name, entry in index.items()}
    dcp.load(tensors, checkpoint_id=folder / "release", no_dist=True)
    return tensors


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_there_and_back(name: str, grid: Grid, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint(name)
    assert (name in MIXTURES) == (layout_for(source).num_experts > 0)
    target = "megatron" if grid.tp == 1 else "megatron_te"
    to_megatron(source, tmp_path / "run", grid, target=target, vocab_multiple=8)
    assert len(list((tmp_path / "run" / "release").glob("*.distcp"))) == grid.size
    assert verify(source, tmp_path / "run").equal
    merge(tmp_path / "run", tmp_path / "back")
    assert verify(source, tmp_path / "back").equal


def test_the_values_are_those_of_the_local_tensors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen3-moe")
    to_megatron(source, tmp_path / "run", Grid(tp=2, pp=3, ep=2), vocab_multiple=32)
    tensors = stored(tmp_path / "run")
    layout = layout_for(source, target="megatron_te", vocab_multiple=64)
    local = load_hf(source, layout, Place())
    assert torch.equal(tensors["embedding.word_embeddings.weight"], local["embedding.word_embeddings.weight"])
    assert tensors["embedding.word_embeddings.weight"].shape[0] == 64
    for name, value in local.items():
        expert = re.fullmatch(r"(.*\.mlp\.experts)\.(linear_fc\d\.weight)(\d+)", name)
        if expert is None:
            assert torch.equal(tensors[name], value), name
        else:
            assert torch.equal(tensors[f"{expert[1]}.experts.{expert[2]}"][int(expert[3])], value), name


def test_each_rank_finds_its_part_in_one_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    to_megatron(checkpoint("llama"), tmp_path / "run", Grid(tp=2, pp=2))
    index = read_index(tmp_path / "run" / "release")
    files = {
        name: {chunk.path.name[2]: chunk.box for chunk in index[name].chunks}
        for name in ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.1.mlp.linear_fc2.weight")
    }
    assert files == {
        "decoder.layers.0.self_attention.linear_qkv.weight": {"0": ((0, 32), (0, 32)), "1": ((32, 64), (0, 32))},
        "decoder.layers.1.mlp.linear_fc2.weight": {"2": ((0, 32), (0, 24)), "3": ((0, 32), (24, 48))},
    }
    # The gate and the up projection of a rank are two chunks.
    fused = index["decoder.layers.0.mlp.linear_fc1.weight"].chunks
    assert [(chunk.path.name[2], chunk.box[0]) for chunk in fused] == [
        *(("0", (0, 24)), ("0", (48, 72))),
        *(("1", (24, 48)), ("1", (72, 96))),
    ]


def test_a_value_model_and_a_cast_and_a_sharded_source(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    reshard(source, tmp_path / "shards", Grid(tp=2))
    to_megatron(tmp_path / "shards", tmp_path / "run", dtype=torch.bfloat16)
    assert {entry.dtype for entry in read_index(tmp_path / "run" / "release").values()} == {torch.bfloat16}
    assert verify(source, tmp_path / "run", rtol=0.01, dtypes=False).equal
    to_megatron(tmp_path / "run", tmp_path / "again", Grid(tp=4), target="megatron")
    assert verify(tmp_path / "run", tmp_path / "again").equal
    layout = layout_for(source)
    for place in Grid(tp=2, pp=2).places():
        loaded = load_hf(tmp_path / "again", layout, place, dtype=torch.float32)
        expected = load_hf(source, layout, place, dtype=torch.bfloat16)
        assert {name: value.bfloat16().tolist() for name, value in loaded.items()} == {
            name: value.tolist() for name, value in expected.items()
        }
    value = layout_for(source, role="value")
    tensors = load_hf(source, value) | {"score.weight": torch.ones(1, 32), "score.bias": torch.ones(1)}
    save_hf(tmp_path / "value", tensors, value)
    to_megatron(tmp_path / "value", tmp_path / "value-run")
    assert open_source(tmp_path / "value-run").layout.role == "value"
    assert verify(tmp_path / "value", tmp_path / "value-run").equal


def test_the_command_writes_a_run_and_reads_it(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, run = checkpoint("llama"), tmp_path / "run"

    def call(*arguments: object) -> Any:
        return CliRunner().invoke(app, [*map(str, arguments)])

    result = call("convert", source, run, "--to", "megatron", "--dims", "tp=2,pp=2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == 4
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "release"
    # A second conversion replaces the first; the folder may hold nothing else.
    assert call("convert", source, run, "--to", "megatron").exit_code == 0
    (run / "release" / "mine.txt").write_text("")
    refused = call("convert", source, run, "--to", "megatron")
    assert (refused.exit_code, "release/mine.txt" in refused.stderr) == (2, True)
    (run / "release" / "mine.txt").unlink()
    assert json.loads(call("inspect", run, "--json").stdout)["bytes"] > 0
    # Megatron's own runs have numbered steps and no config.json.
    shutil.move(run / "release", run / "iter_0000012")
    (run / "latest_checkpointed_iteration.txt").write_text("12\n")
    (run / "config.json").unlink()
    refused = call("convert", run, tmp_path / "back")
    assert (refused.exit_code, "--copy-from" in refused.stderr) == (2, True)
    assert call("convert", run, tmp_path / "back", "--copy-from", source).exit_code == 0
    assert verify(source, tmp_path / "back").equal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "onnx"), "--to=onnx is unknown; use hf, megatron or training"),
        (("--dims", "tp=2"), "--to hf takes no --dims with this source; leave it out"),
        (("--to", "megatron", "--dims", "tp=2,cp=2"), "--dims=tp=2,cp=2 must be sizes of tp, pp, vpp, ep or etp"),
        (("--to", "megatron", "--dims", "tp=2,tp=2"), "--dims=tp=2,tp=2 must be"),
        (("--to", "megatron", "--dims", "tp=3"), "num_attention_heads=4 is not divisible by tp=3; use tp in {1, 2, 4}"),
        (("--to", "megatron", "--format", "fp8"), "--to megatron takes no --format"),
        (("--to", "megatron", "--target", "parallel"), "target='parallel' is no model of Megatron-Core"),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["convert", str(checkpoint("llama")), str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_damaged_bytes_are_not_converted(checkpoint: Checkpoints, tmp_path: Path) -> None:
    merge(checkpoint("llama"), tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its checksum is"):
        to_megatron(tmp_path / "source", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_values_that_are_not_finite_are_kept_with_a_warning(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="decoder.final_layernorm.weight.* a conversion keeps the values"):
        to_megatron(source, tmp_path / "run", Grid(tp=2))
    norm = stored(tmp_path / "run")["decoder.final_layernorm.weight"]
    torch.testing.assert_close(norm, tensors["model.norm.weight"], equal_nan=True, rtol=0, atol=0)


def test_multi_token_prediction_layers_are_left_out_with_a_warning(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("deepseek")
    with pytest.warns(UserWarning, match="multi-token-prediction layers: the 1 of .* are left out"):
        to_megatron(_with_prediction_layer(source, tmp_path / "source"), tmp_path / "run")
    assert verify(source, tmp_path / "run").equal


def _with_prediction_layer(source: Path, folder: Path) -> Path:
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    plain = layout_for(source)
    predicting = layout_for(config).with_prediction_layers_of([f"model.layers.{plain.num_layers}.enorm.weight"])
    tensors = load_hf(source, plain)
    for name, block in predicting.at(Place()).items():
        tensors.setdefault(name, torch.randn(block.shape))
    save_hf(folder, tensors, predicting)
    return folder


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h"])
def test_hybrids_are_refused_by_name(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Also Nemotron-H, of which Megatron-Core has every tensor in a model, under other names in its checkpoints."""
    family = name.replace("-", "_")
    with pytest.raises(ValueError, match=f"{family} has linear attention, .*; use a Hugging Face folder, or a sharded"):
        to_megatron(checkpoint(name), tmp_path / "out")
    assert not (tmp_path / "out").exists()
