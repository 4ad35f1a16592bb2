"""The index and the chunks of distributed checkpoints, as torch itself writes and reads them."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties

from ckpt.files.torch_dist import METADATA, ChunkReader, ChunkWriter, read_index
from ckpt.layout.pieces import full_box

TENSORS = {
    "matrix": torch.arange(24, dtype=torch.bfloat16).view(4, 6),
    "vector": torch.arange(5, dtype=torch.float32),
    "number": torch.tensor(3, dtype=torch.int64),
    "view": torch.arange(40.0)[8:20].view(3, 4),
}


def values(folder: Path) -> dict[str, list[Tensor]]:
    """The values of every chunk, read from where the reader finds them."""
    reader, held = ChunkReader(), dict[str, list[Tensor]]()
    for name, tensor in read_index(folder).items():
        for chunk in tensor.chunks:
            info = reader.locate(name, tensor, chunk)
            raw = bytearray(chunk.path.read_bytes()[info.offset : info.offset + info.nbytes])
            held.setdefault(name, []).append(torch.frombuffer(raw, dtype=info.dtype).view(info.shape))
    return held


def test_what_torch_writes_is_found(tmp_path: Path) -> None:
    dcp.save({**TENSORS, "object": {"not": "a tensor"}}, checkpoint_id=tmp_path, no_dist=True)
    held = values(tmp_path)
    assert held.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        (value,) = held[name]
        assert torch.equal(value, expected)


def test_an_index_of_a_later_torch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 stores a property more than 2.11."""
    state = TensorProperties.__getstate__
    with monkeypatch.context() as later:
        later.setattr(TensorProperties, "__getstate__", lambda self: (*state(self), "new"))
        dcp.save({"x": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path)["x"].dtype == torch.bfloat16


def test_what_is_written_torch_reads_from_any_chunks(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path)
    matrix = TENSORS["matrix"]
    writer.write_file(
        0, [("matrix", (4, 6), ((0, 2), (0, 6)), matrix[:2]), ("vector", (5,), ((0, 5),), TENSORS["vector"])]
    )
    writer.write_file(1, [("matrix", (4, 6), ((2, 4), (4, 6)), matrix[2:, 4:].clone())])
    writer.write_file(2, [("matrix", (4, 6), ((2, 4), (0, 4)), matrix[2:, :4].clone())])
    writer.write_index()
    loaded = {"matrix": torch.zeros(4, 6, dtype=torch.bfloat16), "vector": torch.zeros(5)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["matrix"], matrix)
    assert torch.equal(loaded["vector"], TENSORS["vector"])
    index = read_index(tmp_path)
    assert index["matrix"].shape == (4, 6)
    assert [chunk.path.name for chunk in index["matrix"].chunks] == [f"__{rank}_0.distcp" for rank in range(3)]


def test_a_chunk_that_is_part_of_its_storage_is_found(tmp_path: Path) -> None:
    """torch.save writes the whole storage of a view."""
    writer = ChunkWriter(tmp_path)
    writer.write_file(0, [("vector", (5,), full_box((5,)), torch.arange(9.0)[3:8])])
    writer.write_index()
    assert [chunk.tolist() for chunk in values(tmp_path)["vector"]] == [[3.0, 4.0, 5.0, 6.0, 7.0]]


class Touch:
    """An object whose unpickling would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["index", "chunk"])
def test_no_code_of_a_file_runs(where: str, tmp_path: Path) -> None:
    folder, witness = tmp_path / "folder", tmp_path / "witness"
    writer = ChunkWriter(folder)
    folder.mkdir()
    writer.write_file(0, [("vector", (5,), full_box((5,)), TENSORS["vector"])])
    writer.write_index()
    if where == "index":
        (folder / METADATA).write_bytes(pickle.dumps(Touch(witness)))
        with pytest.raises(ValueError, match=r"no index of a distributed checkpoint: it asks for posix.mkdir"):
            values(folder)
    else:
        with zipfile.ZipFile(folder / "__0_0.distcp", "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Touch(witness), protocol=2))
            archive.writestr("archive/byteorder", b"little")
            archive.writestr("archive/data/0", b"0" * 20)
            archive.writestr("archive/version", b"3\n")
        change_index(folder, (folder / "__0_0.distcp").stat().st_size)
        with pytest.raises(ValueError, match="vector is damaged"):
            values(folder)
    assert not witness.exists()


def change_index(folder: Path, length: int) -> None:
    """Let the index say that the only chunk has another length."""
    index = pickle.loads((folder / METADATA).read_bytes())
    (place,) = index.storage_data.values()
    place.length = length
    (folder / METADATA).write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("name", ["dtype of another class", "os.system through a module"])
def test_a_name_that_leads_out_of_the_records_is_refused(name: str, tmp_path: Path) -> None:
    module = "torch.distributed.checkpoint.filesystem"
    path = {"dtype of another class": ("torch", "load"), "os.system through a module": (module, "os.system")}[name]
    (tmp_path / METADATA).write_bytes(
        b"\x80\x04" + b"".join(b"\x8c" + struct.pack("B", len(text)) + text.encode() for text in path) + b"\x93."
    )
    with pytest.raises(ValueError, match="which could run code"):
        read_index(tmp_path)


@pytest.mark.parametrize("damage", ["missing index", "cut index", "missing file", "cut file", "another shape"])
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path)
    shape = (6,) if damage == "another shape" else (5,)
    writer.write_file(0, [("vector", shape, full_box(shape), TENSORS["vector"])])
    writer.write_index()
    file = tmp_path / ("__0_0.distcp" if damage.endswith("file") else METADATA)
    if damage.startswith("missing"):
        file.unlink()
    elif damage.startswith("cut"):
        file.write_bytes(file.read_bytes()[:-100])
    fix = {"missing index": "No such file", "cut index": "no index", "another shape": "the index says"}
    with pytest.raises(ValueError, match=fix.get(damage, r"__0_0.distcp(: vector is damaged| cannot be read)")):
        values(tmp_path)


@pytest.mark.parametrize(
    ("text", "change"),
    [(b"byteorder", b"byteorde\xff"), (b"data.pkl", b"data\xffpkl"), (b"archive", b"\xffrchive")],
    ids=["an entry", "the pickle", "the root"],
)
def test_damaged_names_in_an_archive_name_the_file(text: bytes, change: bytes, tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path)
    writer.write_file(0, [("vector", (5,), full_box((5,)), TENSORS["vector"])])
    writer.write_index()
    file = tmp_path / "__0_0.distcp"
    content = file.read_bytes()
    assert text in content
    file.write_bytes(content.replace(text, change))
    with pytest.raises(ValueError, match=r"__0_0.distcp: vector is damaged \(.*\); copy the file again"):
        values(tmp_path)


def test_a_file_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    writer = ChunkWriter(folder)
    writer.write_file(0, [("vector", (5,), full_box((5,)), TENSORS["vector"])])
    writer.write_index()
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    index = pickle.loads((folder / METADATA).read_bytes())
    (place,) = index.storage_data.values()
    place.relative_path = "../secret"
    (folder / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="folder/secret cannot be read"):
        values(folder)
