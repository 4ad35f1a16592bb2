from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors import safe_open
from typer.testing import CliRunner

from ckpt import (
    AdapterLayout,
    Checkpoint,
    Grid,
    Place,
    layout_for,
    load_hf,
    load_training,
    merge,
    reshard,
    save_adapter,
    save_hf,
    save_training,
)
from ckpt.cli import app
from ckpt.files.header import read_header
from ckpt.files.tensor_bytes import crc32

Checkpoints = Callable[..., Path]


@pytest.fixture
def saved(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    layout = layout_for(checkpoint("llama"))
    save_hf(tmp_path / "saved", load_hf(checkpoint("llama"), layout), layout, max_shard_size="20KB")
    return tmp_path / "saved"


def damage(folder: Path, tensor: str) -> None:
    """Flip one bit of a tensor, in the last of the files that hold it."""
    headers = {file: read_header(file) for file in sorted(folder.rglob("*.safetensors"), reverse=True)}
    file, info = next((file, header.tensors[tensor]) for file, header in headers.items() if tensor in header.tensors)
    with open(file, "r+b") as opened:
        opened.seek(info.offset + info.nbytes // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_found_and_named(saved: Path) -> None:
    load_hf(saved, layout_for(saved), check=True)
    damage(saved, "model.layers.1.mlp.up_proj.weight")
    load_hf(saved, layout_for(saved))
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight in .* is damaged: its checksum"):
        load_hf(saved, layout_for(saved), check=True)


def test_checksums_leave_a_file_that_others_can_read(saved: Path) -> None:
    for file in saved.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert all(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118 (not a mapping)


def test_a_check_without_recorded_checksums_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(
        ValueError, match=r"model.safetensors has no recorded checksums, which every save of ckpt writes"
    ):
        load_hf(checkpoint("llama"), layout_for(checkpoint("llama")), check=True)


def edit_header(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"dtype":"F32","shape":[48,32]', b'"dtype":"I32","shape":[48,32]', "is I32 48x32, its recorded checksum"),
        (b'"shape":[48,32]', b'"shape":[32,48]', "is F32 32x48, its recorded checksum '.{8} F32 48x32'"),
        (b'F32 48x32', b'F32 48x33', "is F32 48x32, its recorded checksum '.{8} F32 48x33'"),
        (b'"ckpt.checksums":"{', b'"ckpt.checksums":"[', "in its metadata is no map of names to checksums"),
    ],
)  # fmt: skip
def test_names_types_and_shapes_are_checked_without_reading_the_tensors(
    old: bytes, new: bytes, message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    layout = layout_for(checkpoint("llama"))
    save_hf(tmp_path / "saved", load_hf(checkpoint("llama"), layout), layout)
    edit_header(tmp_path / "saved" / "model.safetensors", old, new)
    with pytest.raises(ValueError, match=message) as caught:
        Checkpoint.open(tmp_path / "saved")
    assert "model.safetensors" in str(caught.value)


def save_all_ways(source: Path, out: Path) -> dict[str, Path]:
    """One folder of each kind that is written here."""
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    moments = {name: {"exp_avg": tensor * 2, "step": torch.tensor(3.0)} for name, tensor in tensors.items()}
    save_hf(out / "save_hf", tensors, layout, max_shard_size="20KB")
    save_training(out / "save_training", 1, tensors, layout, optimizer=moments)
    reshard(source, out / "reshard", Grid(tp=2))
    merge(out / "reshard", out / "merge", max_shard_size="20KB")
    return {path.name: path for path in out.iterdir()}


def test_every_folder_that_is_written_has_right_checksums_and_damage_is_found_on_request(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    folders = save_all_ways(source, tmp_path / "saved")
    checks = {
        "save_hf": lambda path, check: load_hf(path, layout, check=check),
        "save_training": lambda path, check: load_training(path, layout, check=check),
        "reshard": lambda path, check: load_hf(path, layout, Place(tp=(1, 2)), check=check),
        "merge": lambda path, check: load_hf(path, layout, check=check),
    }
    assert folders.keys() == checks.keys()
    for name, load in checks.items():
        load(folders[name], True)
        for file in folders[name].rglob("*.safetensors"):
            header = read_header(file)
            assert header.checksums == {key: crc32(file, info) for key, info in header.tensors.items()}
            assert "00000000" not in header.checksums.values()
    for name, load in checks.items():
        tensor = f"optimizer/exp_avg/{NORM}@0" if name == "save_training" else NORM
        damage(folders[name], tensor)
        load(folders[name], False)
        with pytest.raises(ValueError, match=f"{re.escape(tensor)} in .*safetensors is damaged: its checksum is"):
            load(folders[name], True)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_inspect_checks_on_request(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    save_hf(whole, load_hf(source, layout), layout)
    reshard(source, shards, Grid(tp=2))
    assert run("inspect", shards, "--check").exit_code == 0
    assert "recorded and right" in run("inspect", whole, "--check").output
    assert re.search(r"checksums *│ none", run("inspect", source).output)
    refused = run("inspect", source, "--check")
    assert refused.exit_code == 2
    assert "has no recorded checksums" in refused.stderr
    for folder in (whole, shards):
        damage(folder, NORM)
        assert run("inspect", folder).exit_code == 0
        refused = run("inspect", folder, "--check")
        assert refused.exit_code == 2
        assert f"{NORM} in " in refused.stderr


def test_a_conversion_refuses_damaged_bytes(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The result would have right checksums of the damaged bytes."""
    source = checkpoint("llama")
    layout = layout_for(source)
    whole, shards, adapter = tmp_path / "whole", tmp_path / "shards", tmp_path / "adapter"
    save_hf(whole, load_hf(source, layout), layout, max_shard_size="20KB")
    reshard(source, shards, Grid(tp=2))
    settings = {"base_model_name_or_path": str(source), "lora_alpha": 2}
    low_rank = AdapterLayout(layout, ["model.layers.0.mlp.up_proj"], 2, settings)
    factors = {name: torch.ones(block.shape) for name, block in low_rank.at(Place()).items()}
    save_adapter(adapter, factors, low_rank)
    factor = next(iter(read_header(adapter / "adapter_model.safetensors").tensors))
    out = tmp_path / "out"
    commands: list[tuple[object, ...]] = [
        ("shard", whole, out, "--tp", 2),
        ("shard", whole, out, "--pp", 2),
        ("convert", whole, out, "--format", "fp8"),
        ("convert", whole, out, "--dtype", "bfloat16"),
        ("reshard", shards, out),
        ("merge", shards, out),
        ("merge", adapter, out),
    ]
    for command in commands:
        assert run(*command).exit_code == 0
        shutil.rmtree(out)
    # A projection, of which the fp8 conversion reads no box before it is checked.
    for folder, name in ((whole, "model.layers.1.mlp.up_proj.weight"), (shards, NORM), (adapter, factor)):
        damage(folder, name)
        for command in commands:
            if command[1] == folder:
                refused = run(*command)
                assert refused.exit_code == 2, command
                assert f"{name} in " in refused.stderr
                assert "is damaged: its checksum is" in refused.stderr
                assert not out.exists()


def load_checked(group: Any, source: str) -> str:
    try:
        load_hf(source, layout_for(source), Place(tp=(group.rank(), 2)), group=group, check=True)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_ranks_share_the_checking_and_all_hear_of_damage(saved: Path, ranks: Any) -> None:
    assert ranks.run(load_checked, str(saved), world=2) == ["loaded", "loaded"]
    damage(saved, "model.norm.weight")
    assert all("model.norm.weight" in text for text in ranks.run(load_checked, str(saved), world=2, timeout=10))
