from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import Grid, layout_for, load_hf, merge, reshard, verify
from ckpt.files.written_files import FilePlan, create_files
from ckpt.transfer.sources import open_source

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]


@pytest.mark.parametrize(
    ("name", "first", "second", "staging"),
    [
        ("llama-tied", Grid(tp=2, pp=2), Grid(tp=4), 64),
        ("deepseek", Grid(tp=2, ep=2, pp=3), Grid(tp=1, ep=4), 1000),
        ("qwen3-vl", Grid(tp=2), Grid(pp=2, vpp=1), 16 << 20),
    ],
    ids=["llama", "deepseek", "qwen3-vl"],
)
def test_files_go_from_grid_to_grid_and_come_back(
    name: str,
    first: Grid,
    second: Grid,
    staging: int,
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckpt.files.boxio.STAGING_BYTES", staging)
    source = checkpoint(name)
    steps = []
    reshard(source, tmp_path / "a", first, target="megatron", vocab_multiple=8, progress=lambda *at: steps.append(at))
    assert steps[-1][0] == steps[-1][1]
    assert steps == sorted(steps)
    reshard(tmp_path / "a", tmp_path / "b", second, target="parallel")
    layout = layout_for(source)
    for place in second.places():
        assert_same(load_hf(tmp_path / "b", layout, place), load_hf(source, layout, place))
    merge(tmp_path / "b", tmp_path / "c", max_shard_size="20KB")
    assert_same(read_all(tmp_path / "c"), read_all(source))


def test_a_sharded_folder_loads_on_its_own_grid_and_on_any_other(
    checkpoint: Checkpoints, assert_same: AssertSame, tmp_path: Path
) -> None:
    source = checkpoint("qwen2")
    grids = Grid(tp=2), Grid(tp=4, pp=2)
    reshard(source, tmp_path / "a", grids[1], target="megatron")
    for grid, layout in ((grids[0], layout_for(source)), (grids[1], layout_for(source, "megatron"))):
        for place in grid.places():
            assert_same(load_hf(tmp_path / "a", layout, place), load_hf(source, layout, place))
    # A place's file holds the tensors under their local names, for a program without ckpt.
    file = tmp_path / "a" / "shard-00007-of-00008.safetensors"
    assert_same(load_file(file), load_hf(source, layout_for(source, "megatron"), place))


def test_weights_are_cast(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    reshard(source, tmp_path / "b", Grid(tp=2), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_hf(tmp_path / "b", layout_for(source)).values()} == {torch.bfloat16}
    merge(tmp_path / "b", tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.fixture
def sharded(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    reshard(checkpoint("llama"), tmp_path / "sharded", Grid(tp=2))
    return tmp_path / "sharded"


def test_a_sharded_folder_of_another_model_is_refused(sharded: Path, checkpoint: Checkpoints) -> None:
    with pytest.raises(ValueError, match=r"of different models: .*embed_tokens.weight \(51, 32\) has shape"):
        load_hf(sharded, layout_for(checkpoint("llama", vocab_size=51)))


def test_broken_sharded_folders_are_refused_by_name(sharded: Path) -> None:
    layout = json.loads((sharded / "layout.json").read_text())
    for change, message in (
        ({"version": 9}, "version=9 must be 3, the version that is known"),
        ({"grid": {"tp": 2, "zp": 1}}, "must be the sizes of tp, pp, vpp, ep and etp"),
        ({"grid": {**layout["grid"], "tp": 1}}, "shard-00000-of-00001.safetensors does not exist"),
        (
            {"target": "megatron"},
            "the tensors at tp=0/2 in .*shard-00000-of-00002.safetensors do not match the layout: missing",
        ),
    ):
        (sharded / "layout.json").write_text(json.dumps({**layout, **change}))
        with pytest.raises(ValueError, match=message):
            open_source(sharded)
    (sharded / "layout.json").write_text(json.dumps(layout))
    os.truncate(sharded / "shard-00001-of-00002.safetensors", 1000)
    with pytest.raises(ValueError, match=r"shard-00001-of-00002.safetensors"):
        merge(sharded, sharded.parent / "merged")
    assert not (sharded.parent / "merged").exists()


ODD = [None, True, -1, 0, 1.5, 2**70, "x", [], [[]], ["a"], {}, {"a": 1}, {"a": [-1]}, {"a": ["b"]}]


def test_a_damaged_layout_file_is_refused_at_once_by_name(sharded: Path) -> None:
    """Any value of an entry gives the checkpoint or a ValueError that names the file, within seconds."""
    facts = json.loads((sharded / "layout.json").read_text())
    damaged: list[Any] = [{**facts, entry: value} for entry in facts for value in ODD]
    damaged += [{**facts, "grid": {**facts["grid"], axis: value}} for axis in facts["grid"] for value in ODD]
    damaged += [{entry: facts[entry] for entry in facts if entry != lost} for lost in facts]
    start, messages = time.monotonic(), []
    for content in [*damaged, *ODD]:
        (sharded / "layout.json").write_text(json.dumps(content))
        try:
            open_source(sharded)
        except ValueError as error:
            messages.append(str(error))
    assert time.monotonic() - start < 10
    # A grid of other sizes has other files.
    assert [text for text in messages if not re.search(r"layout\.json|shard-\d+-of-\d+", text)] == []
    # The same again: etp null, carried {}, prediction_layers 0 or lost, transposes true (no square experts) or lost.
    assert len(damaged) + len(ODD) - len(messages) == 6
    (sharded / "layout.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"layout.json is not valid JSON"):
        open_source(sharded)


@pytest.mark.parametrize("failing", ["posix_fallocate", "pwritev", "fsync"])
@pytest.mark.parametrize(
    "step", [lambda source, out: reshard(source, out, Grid(tp=2)), merge], ids=["reshard", "merge"]
)
def test_a_full_disk_is_a_clear_error_and_the_old_files_stay(
    step: Callable[[Path, Path], None], failing: str, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    step(sharded, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match=r"No space left|is full: the save needs [\d,]+ bytes, [\d,]+ are free"):
            step(sharded, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "sharded"]


def test_a_cast_joins_tensors_of_several_types(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "mixed"
    shutil.copytree(checkpoint("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].bfloat16()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"qkv_proj.weight joins tensors of types .*; pass dtype= to cast"):
        reshard(source, tmp_path / "shards", Grid(tp=2))
    reshard(source, tmp_path / "shards", Grid(tp=2), dtype=torch.bfloat16)
    layout = layout_for(source)
    for place in Grid(tp=2).places():
        expected = load_hf(source, layout, place, dtype=torch.bfloat16)
        found = load_hf(tmp_path / "shards", layout, place)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_place_with_a_tensor_of_another_type_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Its values differ by less than the other places' type can tell, so that a comparison in that type saw nothing."""
    for name in ("a", "b"):
        reshard(checkpoint("llama"), tmp_path / name, Grid(tp=2))
    file = tmp_path / "b" / "shard-00001-of-00002.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].double() * (
        1 + 1e-12
    )
    save_file(tensors, file)
    message = (
        r"down_proj.weight is of several types: torch.float32 in .*00000-of-00002.safetensors and torch.float64 in "
    )
    with pytest.raises(ValueError, match=message):
        verify(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=message):
        merge(tmp_path / "b", tmp_path / "c")


def test_damage_in_a_file_of_which_nothing_is_copied_is_found(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A file of tensors that layouts ignore; its damage says that the copy of the folder has failed."""
    source = tmp_path / "source"
    merge(checkpoint("llama"), source, max_shard_size="20KB")
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plan = FilePlan({"ignored.safetensors": {ignored: (torch.float32, (4,))}})
    create_files(source, plan)
    plan.complete(source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][ignored] = "ignored.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    merge(source, tmp_path / "out")
    file = source / "ignored.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    for step in (lambda out: merge(source, out), lambda out: reshard(source, out, Grid(tp=2))):
        with pytest.raises(ValueError, match=f"{re.escape(ignored)} in .*ignored.safetensors is damaged"):
            step(tmp_path / "damaged")
        assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"format": "fp8"}], ids=str)
def test_values_that_are_not_finite_are_named_and_kept(
    options: dict[str, Any], checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    stored = read_all(checkpoint("llama"))
    stored[name][3, 1] = torch.nan
    source = tmp_path / "source"
    source.mkdir()
    save_file(stored, source / "model.safetensors")
    shutil.copyfile(checkpoint("llama") / "config.json", source / "config.json")
    with pytest.warns(UserWarning, match=f"{name} holds NaN or infinite values; a conversion keeps the values"):
        merge(source, tmp_path / "out", **options)
    assert read_all(tmp_path / "out")[name].float().isnan().any()
