"""`ckpt convert` reads torch's pickled checkpoints, and runs no code of theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ckpt import merge, verify
from ckpt.cli import app

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]


def pickled(source: Path, folder: Path, state: dict[str, Any], shards: int) -> Path:
    """The checkpoint as `torch.save` writes it."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    weight_map = {name: f"pytorch_model-{1 + i % shards}-of-{shards}.bin" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(("name", "shards"), [("llama", 1), ("qwen2-tied", 2), ("qwen3-vl", 1)])
def test_a_pickled_checkpoint_is_converted(
    name: str, shards: int, checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    source = checkpoint(name)
    state: dict[str, Any] = read_all(source)
    if name == "qwen2-tied":
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    folder = pickled(source, tmp_path / "pickled", state, shards)
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert verify(source, tmp_path / "out").equal


def test_one_file_is_converted(checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path) -> None:
    source = checkpoint("llama")
    folder = pickled(source, tmp_path / "pickled", read_all(source), 1)
    (folder / "pytorch_model.bin").rename(folder / "model.pt")
    merge(folder / "model.pt", tmp_path / "out", dtype=torch.bfloat16)
    assert verify(source, tmp_path / "out", rtol=0.01, dtypes=False).equal


class Touch:
    """An object whose unpickling would make a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.file,)


def test_code_is_not_run_and_odd_files_are_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    whole = torch.randn(3, 4)
    for number, (state, message) in enumerate(
        (
            ({"a": Touch(str(tmp_path / "run"))}, "is damaged, or holds more than tensors"),
            ({"a": whole.t()}, "holds a in another order; write it anew"),
            ({"state_dict": {"a": whole}}, "state_dict is a dict, not a tensor"),
        )
    ):
        folder = pickled(source, tmp_path / str(number), state, 1)
        with pytest.raises(ValueError, match=rf"pytorch_model.bin:? .*{message}"):
            merge(folder, tmp_path / "out")
    torch.save({"a": whole}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"is in the format of before torch 1.6"):
        merge(folder, tmp_path / "out")
    (folder / "pytorch_model.bin").write_bytes(b"hello")
    with pytest.raises(ValueError, match="is damaged"):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()
