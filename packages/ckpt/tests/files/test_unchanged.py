"""A folder that is replaced while it is read is an error by name: what was read may be of two versions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckpt.training.checkpoint
import ckpt.transfer.load
import ckpt.transfer.offline
from ckpt import (
    Grid,
    Place,
    layout_for,
    load_hf,
    load_training,
    merge,
    reshard,
    save_hf,
    save_training,
    to_megatron,
    verify,
)
from ckpt.training import megatron_to_training, saved_step, training_to_megatron
from ckpt.transfer import tensor_files, to_megatron as transfer_to_megatron

Checkpoints = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def as_hf(folder: Path, tensors: Tensors, source: Path) -> None:
    save_hf(folder, tensors, layout_for(source), max_shard_size="20KB")


def as_shards(folder: Path, tensors: Tensors, source: Path) -> None:
    whole = folder.with_name("whole")
    save_hf(whole, tensors, layout_for(source))
    reshard(whole, folder, Grid())


def as_training(folder: Path, tensors: Tensors, source: Path) -> None:
    save_training(folder, 7, tensors, layout_for(source))


def as_trained(folder: Path, tensors: Tensors, source: Path) -> None:
    moments = ("exp_avg", "exp_avg_sq")
    state = {
        name: {"step": torch.tensor(7.0), **dict.fromkeys(moments, torch.zeros(x.shape))} for name, x in tensors.items()
    }
    save_training(folder, 7, tensors, layout_for(source), optimizer=state)


def as_megatron(folder: Path, tensors: Tensors, source: Path) -> None:
    as_trained(folder.with_name("training"), tensors, source)
    shutil.rmtree(folder, ignore_errors=True)  # a run with numbered steps is never replaced
    training_to_megatron(folder.with_name("training"), folder)


def beside(folder: Path) -> Path:
    """Return a path where nothing is yet."""
    return Path(tempfile.mkdtemp(dir=folder.parent)) / "out"


def age(folder: Path) -> None:
    """Clocks of files tick in milliseconds: what is written next has another time, however fast this machine is."""
    for file in folder.rglob("*"):
        os.utime(file, (0, 0))


# How a folder is saved, what reads it (given the folder and the source), and what that reads a part of it by.
READERS: list[tuple[str, Any, Callable[[Path, Path], object], Any, str]] = [
    ("load_hf", as_hf, lambda a, b: load_hf(a, layout_for(b)), ckpt.transfer.load, "read_all"),
    ("load_hf check", as_hf, lambda a, b: load_hf(a, layout_for(b), check=True), tensor_files, "check_bytes"),
    ("verify", as_hf, lambda a, b: verify(a, b), tensor_files, "read_all"),
    ("verify second", as_hf, lambda a, b: verify(b, a), tensor_files, "read_all"),
    ("reshard", as_hf, lambda a, b: reshard(a, a.parent / "out", Grid(tp=2)), ckpt.transfer.offline, "read_box"),
    ("merge", as_shards, lambda a, b: merge(a, a.parent / "out"), ckpt.transfer.offline, "read_box"),
    ("load_hf shards", as_shards, lambda a, b: load_hf(a, layout_for(b)), ckpt.transfer.load, "read_all"),
    ("to_megatron", as_hf, lambda a, b: to_megatron(a, beside(a)), transfer_to_megatron, "read_all"),
    ("to training", as_megatron, lambda a, b: megatron_to_training(a, beside(a)), tensor_files, "read_all"),
    ("of training", as_trained, lambda a, b: training_to_megatron(a, beside(a)), transfer_to_megatron, "read_all"),
    ("state of training", as_trained, lambda a, b: training_to_megatron(a, beside(a)), saved_step, "open_boxes"),
    ("merge megatron", as_megatron, lambda a, b: merge(a, beside(a)), ckpt.transfer.offline, "read_box"),
    ("load_training", as_training, lambda a, b: load_training(a, layout_for(b)), ckpt.training.checkpoint, "read_all"),
]  # fmt: skip
# A plain run has another reader by the same function.
SIBLINGS = {"verify second", "load_hf shards", "to_megatron", "merge megatron"}


@pytest.mark.parametrize(
    ("save", "read", "module", "part"),
    [pytest.param(*reader, id=name, marks=pytest.mark.slow if name in SIBLINGS else ()) for name, *reader in READERS],
)
def test_every_reader_notices(
    save: Any, read: Any, module: Any, part: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source, folder = checkpoint("llama"), tmp_path / "saved"
    tensors = load_hf(source, layout_for(source))
    save(folder, tensors, source)
    age(folder)
    read(folder, source)
    original = getattr(module, part)

    def replace_then_read(*args: Any, **kwargs: Any) -> Any:
        setattr(module, part, original)
        save(folder, {name: tensor + 1 for name, tensor in tensors.items()}, source)
        return original(*args, **kwargs)

    with (
        mock.patch.object(module, part, replace_then_read),
        pytest.raises(ValueError, match=r"saved.* was replaced while it was read"),
    ):
        read(folder, source)
    read(folder, source)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("change", [Path.unlink, Path.touch, lambda file: file.write_bytes(b"")])
def test_a_file_that_is_gone_or_written_to(
    change: Callable[[Path], object], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """The error is what it comes from, not what comes of it."""
    source, folder = checkpoint("llama"), tmp_path / "saved"
    layout, read_all = layout_for(source), ckpt.transfer.load.read_all
    as_hf(folder, load_hf(source, layout), source)
    age(folder)
    last = sorted(folder.glob("*.safetensors"))[-1]

    def change_then_read(*args: Any, **kwargs: Any) -> None:
        change(last)
        read_all(*args, **kwargs)

    with (
        mock.patch.object(ckpt.transfer.load, "read_all", change_then_read),
        pytest.raises(ValueError, match=f"{last.name} was replaced while it was read"),
    ):
        load_hf(folder, layout)


def load_while_the_second_saves(group: Any, source: str, folder: str) -> None:
    layout, read_all = layout_for(source), ckpt.transfer.load.read_all
    tensors = load_hf(source, layout)

    def read_then_replace(*args: Any, **kwargs: Any) -> None:
        read_all(*args, **kwargs)
        if group.rank() == 1:
            as_hf(Path(folder), tensors, Path(source))

    with (
        mock.patch.object(ckpt.transfer.load, "read_all", read_then_replace),
        pytest.raises(ValueError, match="was replaced while it was read"),
    ):
        load_hf(folder, layout, Place(tp=(group.rank(), 2)), group=group)


def test_every_rank_of_a_group_is_told(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    source, folder = checkpoint("llama"), tmp_path / "saved"
    as_hf(folder, load_hf(source, layout_for(source)), source)
    age(folder)
    ranks.run(load_while_the_second_saves, str(source), str(folder), world=2)
