"""Damaged files of every kind: one error names the damage, the same on every rank, within ten seconds."""

from __future__ import annotations

import json
import os
import pickle as pickles
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import Grid, Place, layout_for, load_hf, load_training, reshard, save_hf, save_training, verify
from ckpt.files.contents import INDEX

Checkpoints = Callable[..., Path]
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def edit_header(folder: Path, edit: Callable[[str, dict[str, Any]], str]) -> None:
    """Let a file say of its tensors what `edit` makes of its header's text and entries."""
    file = next(path for path in sorted(folder.glob("*.safetensors")) if NORM.encode() in path.read_bytes())
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = content[8:end].decode()
    raw = edit(text, json.loads(text)).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[end:])


def lie(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_header(folder, lambda _, all_: json.dumps({**all_, NORM: {**all_[NORM], **fields}}))


def shift(by: int) -> Callable[[Path], None]:
    def edit(_: str, entries: dict[str, Any]) -> str:
        offsets = [offset + by for offset in entries[NORM]["data_offsets"]]
        return json.dumps({**entries, NORM: {**entries[NORM], "data_offsets": offsets}})

    return lambda folder: edit_header(folder, edit)


def name_twice(folder: Path) -> None:
    edit_header(folder, lambda text, entries: f'{text.rstrip()[:-1]},"{NORM}":{json.dumps(entries[NORM])}}}')


def truncate(folder: Path) -> None:
    victim = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(victim, victim.stat().st_size - 1)


def point(file: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][HEAD] = file
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def count_in_integers(folder: Path) -> None:
    file = next(path for path in folder.glob("*.safetensors") if NORM.encode() in path.read_bytes())
    tensors = load_file(file)
    save_file({**tensors, NORM: tensors[NORM].to(torch.int32)}, file)


def pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({NORM: torch.ones(32)}, folder / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "truncated": (truncate, (".safetensors is damaged or truncated", "copy or download it again")),
    "overlap": (shift(-4), ("invalid offset for tensor `", "damaged")),
    "out of range": (shift(1 << 40), (f"invalid offset for tensor `{NORM}`",)),
    "overflow": (lie(shape=[2**31, 2**31, 2**31]), ("overflow computing buffer size",)),
    "offsets beyond 64 bits": (lie(data_offsets=[0, 2**64]), ("invalid JSON in header",)),
    "duplicate keys": (name_twice, (f"the key '{NORM}' appears twice",)),
    "unknown dtype": (lie(dtype="F31"), ("unknown variant `F31`",)),
    "dtype of another size": (lie(dtype="F64"), ("invalid shape, data type, or offset",)),
    "integers for weights": (count_in_integers, (NORM, "torch.int32", "floating-point")),
    "an index naming a missing file": (point("model-9.safetensors"), ("model-9.safetensors is missing", HEAD)),
    "a path that escapes": (point("../model.safetensors"), ("'../model.safetensors', outside the folder",)),
    "an absolute path": (point("/etc/passwd"), ("'/etc/passwd', outside the folder",)),
    "pickled": (pickle, ("pytorch_model.bin holds pickled weights", "`ckpt convert ")),
}


def load_as_rank(group: Any, config: dict[str, Any], folder: str) -> str:
    try:
        load_hf(folder, layout_for(config), Place(tp=(group.rank(), 2)), group=group)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name_on_every_rank(
    damage: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = checkpoint("llama", max_shard_size="20KB")
    folder = shutil.copytree(source, tmp_path / "model")
    spoil, messages = DAMAGES[damage]
    spoil(folder)
    config = json.loads((source / "config.json").read_text())
    first, second = ranks.run(load_as_rank, config, str(folder), world=2, timeout=10)
    assert first == second
    assert all(message in first for message in messages), first
    # Files to files, and the comparison, refuse the same by the same name, and leave nothing behind.
    for step in (lambda: reshard(folder, tmp_path / "out", Grid(tp=2)), lambda: verify(source, folder)):
        with pytest.raises(ValueError, match=r".") as caught:
            step()
        assert str(caught.value) in first
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def load_saved_as_rank(group: Any, source: str, folder: str, kind: str) -> str:
    load: Any = load_hf if kind == "shards" else load_training
    try:
        load(folder, layout_for(source), Place(tp=(group.rank(), 2)), group=group)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("kind", ["shards", "training"])
def test_a_truncated_file_of_ours_is_refused_on_every_rank(
    kind: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source, folder = checkpoint("llama"), tmp_path / "saved"
    if kind == "shards":
        reshard(source, folder, Grid(tp=2))
    else:
        layout = layout_for(source)
        save_training(folder, 1, load_hf(source, layout), layout)
    victim = sorted(folder.rglob("*.safetensors"))[-1]
    os.truncate(victim, victim.stat().st_size - 1)
    first, second = ranks.run(load_saved_as_rank, str(source), str(folder), kind, world=2, timeout=10)
    # A rank that another one tells of it names that rank.
    assert second in (first, f"rank 0: {first}")
    assert f"{victim.name} is damaged or truncated" in first


class Runs:
    """A pickle of it leaves a file behind when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["whole", "shards", "run"])
def test_no_folder_runs_code_when_it_is_loaded(kind: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Each file of each kind of folder is replaced by a pickle, and torch's own `.metadata` is put beside them."""
    source, folder, marker = checkpoint("llama"), tmp_path / kind, tmp_path / "marker"
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    loads: dict[str, Callable[[], object]] = {
        "whole": lambda: (load_hf(folder, layout, check=True), layout_for(folder), verify(folder, source)),
        "shards": lambda: (load_hf(folder, layout), reshard(folder, tmp_path / "out", Grid())),
        "run": lambda: load_training(folder, layout, check=True),
    }
    if kind == "run":
        save_training(folder, 1, tensors, layout, optimizer={NORM: {"step": torch.tensor(1.0)}})
    elif kind == "whole":
        save_hf(folder, tensors, layout, max_shard_size="20KB")
    else:
        reshard(source, folder, Grid())
    files = [file for file in folder.rglob("*") if file.is_file()]
    payload = pickles.dumps(Runs(marker))
    for file in files:
        (file.parent / ".metadata").write_bytes(payload)
        good = file.read_bytes()
        file.write_bytes(payload)
        # These are copied, or there for people; nothing of them is loaded.
        if (kind, file.name) == ("run", "config.json") or file.name == "generation_config.json":
            loads[kind]()
        else:
            with pytest.raises(ValueError, match=re.escape(file.name)):
                loads[kind]()
        file.write_bytes(good)
    loads[kind]()
    assert not marker.exists()
    pickles.loads(payload)
    assert marker.exists()
