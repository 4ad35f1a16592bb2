"""A save replaces checkpoints only; it refuses a folder that holds anything else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt import Grid, Place, layout_for, load_hf, merge, reshard, save_hf, save_training
from ckpt.files.atomic import FolderWriter, check_target
from ckpt.files.written_files import copy_companions, read_companions

Checkpoints = Callable[..., Path]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


HUB = ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("names", "precious"),
    [
        ((*HUB, "notes.md"), "notes.md"),
        ((*HUB, "README.md", ".gitattributes"), "README.md"),
        ((*HUB, "training_args.bin"), "training_args.bin"),
        ((*HUB, "optimizer.pt"), "optimizer.pt"),
        ((*HUB, "modeling_own.py"), "modeling_own.py"),
        ((*HUB, "adapter_model.safetensors"), "adapter_model.safetensors"),
        ((*HUB, "checkpoint-500/optimizer.pt"), "checkpoint-500/"),
        ((*HUB, ".git/HEAD"), ".git/"),
        ((*HUB, "tokenizer/tokenizer.json"), "tokenizer/"),
        ((*HUB, "additional_chat_templates/notes.md"), "additional_chat_templates/notes.md"),
        (("config.json", "src/main.py"), "src/"),
        (("config.json", "thesis.tex"), "thesis.tex"),
        (("config.json", "metadata.json", "state.json"), "metadata.json"),
        (("config.json", "layout.json"), "layout.json"),
        (("config.json", "layout.json", "shard-00000-of-00001.safetensors", "notes.md"), "notes.md"),
        (("config.json", "state.json", "rank-00000.safetensors", "log.txt"), "log.txt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_with_more_than_a_checkpoint_is_refused_by_name(
    names: tuple[str, ...], precious: str, tmp_path: Path
) -> None:
    target = tmp_path / "saved"
    write(target, *names)
    with pytest.raises(
        ValueError, match=r"holds more than a checkpoint, .* would delete; choose another path"
    ) as caught:
        FolderWriter(target)
    assert repr(precious) in str(caught.value)
    assert all((target / name).read_text() == name for name in names)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("names", [("metadata.json",), ("model.safetensors.index.json",), ("tokenizer.json",)])
def test_a_folder_without_weights_or_a_config_is_no_checkpoint(names: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path / "saved", *names)
    with pytest.raises(ValueError, match="exists and is no checkpoint"):
        check_target(tmp_path / "saved")


def test_every_save_of_ours_is_replaced_by_the_next(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A folder from transformers with all companions, then shards, then a Hugging Face folder in several files, a
    training checkpoint of the same step, and a config without weights."""
    companions = ("tokenizer.json", "tekken.json", "chat_template.jinja", "additional_chat_templates/tool.jinja")
    source, target = checkpoint("llama"), tmp_path / "saved"
    target.mkdir()
    copy_companions(source, target)
    write(target, *HUB, *companions)
    reshard(source, target, Grid(tp=2))
    shutil.copytree(target, tmp_path / "shards")
    merge(tmp_path / "shards", target, max_shard_size="20KB")
    assert len(list(target.glob("model-*"))) > 1
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    save_hf(target, tensors, layout)
    for _ in range(2):
        save_training(tmp_path / "run", 7, tensors, layout, Place())
    write(tmp_path / "bare", "config.json", *companions)
    save_hf(tmp_path / "bare", tensors, layout)
    assert sorted(os.listdir(tmp_path / "bare")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("source", ["folder", "file"])
def test_companions_go_along_and_the_source_is_not_replaced(
    source: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    model, shards, merged = tmp_path / "model", tmp_path / "shards", tmp_path / "merged"
    shutil.copytree(checkpoint("llama"), model)
    companions = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja")
    write(model, *companions, "modeling_own.py")
    given = model if source == "folder" else model / "model.safetensors"
    reshard(given, shards, Grid(tp=2))
    reshard(shards, tmp_path / "again", Grid(pp=2))
    merge(tmp_path / "again", merged)
    merge(shards, tmp_path / "other", copy_from=checkpoint("llama"))
    for folder in (shards, tmp_path / "again", merged):
        assert all((folder / name).read_text() == name for name in companions)
        assert not (folder / "modeling_own.py").exists()
    assert not (tmp_path / "other" / "tokenizer.json").exists()
    before = {file: file.read_bytes() for file in (*model.rglob("*.*"), *shards.rglob("*.*")) if file.is_file()}
    (tmp_path / "link").symlink_to(model)
    for step in (lambda out: reshard(given, out, Grid(tp=2)), lambda out: merge(given, out)):
        for same in (model, tmp_path / "link", model / ".." / "model"):
            with pytest.raises(ValueError, match=r"is the folder of the source, which the result would replace; write"):
                step(same)
    with pytest.raises(ValueError, match="is the folder of the source"):
        merge(shards, shards)
    assert before == {file: file.read_bytes() for file in before}


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "mnt"
    mount.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mount)
    with pytest.raises(
        ValueError, match=r"mnt is a mount point, which cannot be replaced; save into a folder below it"
    ):
        FolderWriter(mount)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mnt"]
    FolderWriter(mount / "below").discard()


def test_companions_are_copied_and_nothing_else(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    companions = [
        "additional_chat_templates/tool.jinja",
        "normalizer.json",
        "sentencepiece.bpe.model",
        "spiece.model",
        "tekken.json",
        "tokenizer.model",
        "vocab.txt",
    ]
    write(source, *companions, "modeling_own.py", "LICENSE", "additional_chat_templates/notes.md", "tokenizer_old/a")
    (source / "tokenizer.gone").symlink_to(source / "nothing")
    copy_companions(str(source), str(out))
    copied = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert copied == companions
    assert all((out / name).read_text() == name for name in companions)
    contents = read_companions(source)
    shutil.rmtree(source)
    copy_companions(contents, tmp_path / "later")
    assert read_companions(tmp_path / "later") == contents == {name: name.encode() for name in companions}
    with pytest.raises(ValueError, match=r"copy_from=.*none is no folder"):
        copy_companions(str(tmp_path / "none"), out)
