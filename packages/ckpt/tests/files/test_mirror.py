"""Checkpoints in a store: headers are read at once, each file of weights when it is needed, and never a wrong byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckpt
from ckpt import layout_for, load_hf, save_hf, save_training
from ckpt.cli import app
from ckpt.files import mirror
from ckpt.files.mirror import fetch, mirrored

Checkpoints = Callable[..., Path]
URL = "memory://models/one"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


class Counted:
    """The names of the files that were downloaded, and the number of placeholders that take room at a time."""

    def __init__(self) -> None:
        self.names, self.most_whole = list[str](), 0

    def downloaded(self, suffix: str = ".safetensors") -> list[str]:
        return [name for name in self.names if name.endswith(suffix)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, memory_with_listings: Any) -> Iterator[Counted]:
    """Count what is read of the store in memory."""
    files, counted = memory_with_listings, Counted()
    get = type(files).get_file

    def counting(self: Any, source: str, *arguments: Any, **options: Any) -> None:
        get(self, source, *arguments, **options)
        counted.names.append(source)
        # A file of the disk's smallest size has no more than the first bytes.
        whole = sum(file.stat().st_blocks * 512 > 4096 for file in [*mirror._placeholders] if file.is_file())
        counted.most_whole = max(counted.most_whole, whole + source.endswith(".safetensors"))

    monkeypatch.setattr(type(files), "get_file", counting)
    # So that no tensor, and no part of a header but the first, is among the first bytes.
    monkeypatch.setattr(mirror, "_FIRST_BYTES", 40)
    yield counted
    assert not mirror._placeholders


def upload(folder: Path, url: str = URL) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            fsspec.filesystem("memory").put_file(str(file), f"{url}/{file.relative_to(folder)}")


@pytest.fixture
def source(checkpoint: Checkpoints, tmp_path: Path, store: Counted) -> Path:
    """A checkpoint of several files with checksums, also in the store."""
    layout = layout_for(checkpoint("llama"))
    save_hf(tmp_path / "one", load_hf(checkpoint("llama"), layout), layout, max_shard_size="20KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3
    upload(tmp_path / "one")
    return tmp_path / "one"


def test_inspect_and_plan_read_headers_alone(source: Path, store: Counted) -> None:
    for command in ("inspect", "plan"):
        assert json.loads(run(command, URL, "--json").stdout) == json.loads(run(command, source, "--json").stdout)
        assert "memory:/models/one" in run(command, URL).stdout
    assert not store.downloaded()
    assert run("inspect", URL, "--check").exit_code == 0
    assert len(store.downloaded()) == len(list(source.glob("*.safetensors")))


@pytest.mark.parametrize("options", [(), ("--format", "fp8")])
def test_merge_has_one_file_of_weights_at_a_time(
    source: Path, store: Counted, tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = run("convert", URL, tmp_path / "out", "--max-shard-size", "30KB", *options)
    assert result.exit_code == 0, result.output
    assert options or ckpt.verify(source, tmp_path / "out").equal
    names = store.downloaded()
    assert len(names) == len({*names}) == len(list(source.glob("*.safetensors")))
    assert store.most_whole == 1


def test_shards_fp8_and_other_kinds_of_sources(source: Path, store: Counted, tmp_path: Path) -> None:
    assert run("shard", URL, tmp_path / "shards", "--tp", 2).exit_code == 0
    assert len(store.downloaded()) == len({*store.downloaded()}) == len(list(source.glob("*.safetensors")))
    assert ckpt.verify(source, tmp_path / "shards").equal
    upload(tmp_path / "shards", "memory://shards")
    assert run("merge", "memory://shards", tmp_path / "merged").exit_code == 0
    assert ckpt.verify(source, tmp_path / "merged").equal
    for of, name in ((URL, "a"), (source, "b")):
        assert run("merge", of, tmp_path / name, "--format", "fp8").exit_code == 0
    for file in (tmp_path / "b").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "a" / file.name).read_bytes()
    assert run("convert", URL, tmp_path / "run", "--to", "megatron").exit_code == 0
    upload(tmp_path / "run", "memory://run")
    assert run("convert", "memory://run", tmp_path / "back", "--copy-from", URL).exit_code == 0
    assert run("verify", URL, tmp_path / "back").exit_code == 0
    (tmp_path / "pickled").mkdir()
    torch.save(load_hf(source, layout_for(source)), tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "config.json").write_bytes((source / "config.json").read_bytes())
    upload(tmp_path / "pickled", "memory://pickled")
    assert run("convert", "memory://pickled", tmp_path / "plain").exit_code == 0
    assert run("verify", URL, tmp_path / "plain").exit_code == 0
    upload(tmp_path / "plain", "memory://plain")
    assert "the same: " in run("verify", "memory://plain/model.safetensors", tmp_path / "plain").stdout


def test_an_adapter_without_checksums_and_a_tokenizer_with_the_name_of_weights(
    source: Path, store: Counted, tmp_path: Path
) -> None:
    """peft records no checksums, for which the files of others are read as a whole."""
    shapes = {"A": (2, 32), "B": (32, 2)}
    stored = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.rand(shape)
        for layer in range(layout_for(source).num_layers)
        for side, shape in shapes.items()
    }
    (tmp_path / "adapter").mkdir()
    save_file(stored, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    upload(tmp_path / "adapter", "memory://adapter")
    (source / "tokenizer.bin").write_bytes(bytes(range(256)))
    upload(source)
    for adapter, base, out in ((tmp_path / "adapter", source, "a"), ("memory://adapter", URL, "b")):
        assert run("merge", adapter, tmp_path / out, "--base", base).exit_code == 0
    assert not ckpt.verify(source, tmp_path / "a").equal
    assert ckpt.verify(tmp_path / "a", tmp_path / "b").equal
    assert (tmp_path / "b" / "tokenizer.bin").read_bytes() == bytes(range(256))


def test_a_training_run_in_a_store(checkpoint: Checkpoints, store: Counted, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("llama"))
    tensors = load_hf(checkpoint("llama"), layout)
    for step in (1, 2):
        save_training(tmp_path / "run", step, tensors, layout)
    upload(tmp_path / "run", "memory://run")
    facts = [json.loads(run("inspect", of, "--json").stdout) for of in (tmp_path / "run", "memory://run")]
    assert facts[0] == facts[1]
    assert facts[0]["step"] == 2
    assert run("convert", "memory://run", tmp_path / "out").exit_code == 0
    assert ckpt.verify(checkpoint("llama"), tmp_path / "out").equal


def test_a_file_that_changes_while_it_is_read_is_refused(source: Path, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file(f"{URL}/step-1/config.json", b"{}")
    with mirrored(f"{URL}/config.json") as file:
        assert not any(path.is_dir() for path in file.parent.iterdir()), "the files beside it alone"
    assert run("inspect", URL).exit_code == 0
    files.pipe_file(f"{URL}/step-2/config.json", b"{}")
    with mirrored(URL) as folder:
        assert (folder / "step-2" / "config.json").is_file(), "also what is there since the last look"
        name = min(file.name for file in folder.glob("*.safetensors"))
        other = max(file.name for file in folder.glob("*.safetensors"))
        fetch(folder / name)
        assert (folder / name).read_bytes() == (source / name).read_bytes()
        files.pipe_file(f"{URL}/{other}", b"changed")
        with pytest.raises(ValueError, match=rf"{URL}/{other} was replaced while it was read"):
            fetch(folder / other)


def test_errors_name_the_url(source: Path, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    assert "memory://nothing cannot be read: FileNotFoundError" in run("inspect", "memory://nothing").output
    files.pipe_file("/notes/a.txt", b"")
    assert "none of its 1 files is one of a checkpoint or a run" in run("inspect", "memory://notes").output
    files.pipe_file("/out/step-1/../../config.json", b"")
    assert "leads out of its folder" in run("inspect", "memory://out").output
    files.store["/models/one//tokenizer.json"] = files.store["/models/one/config.json"]
    assert "the name '/tokenizer.json' leads out of its folder" in run("inspect", URL).output.replace("\n", "")
    del files.store["/models/one//tokenizer.json"]
    files.rm_file("/models/one/config.json")
    assert f"{URL}/config.json" in run("inspect", URL).output.replace("\n", "")
    with pytest.raises(ValueError, match=rf"{URL}/lost"), mirrored(URL) as folder:
        (folder / "lost").read_bytes()
    result = run("merge", source, "memory://models/two")
    assert result.exit_code == 2
    assert "is a URL; save into a folder of this machine" in result.output
