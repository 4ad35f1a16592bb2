"""Checkpoints in a store: copied once for each version into the cache, and refused where they are not whole."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from ckpt.files import Store

URL = "memory://models/one"


def checkpoint_folder(url: str) -> str:
    """Copy a checkpoint as `parallel_models.engine.checkpoint_folder` does."""
    place = Store.of(url)
    assert place is not None
    return place.copied(("*.json", "*.safetensors"), ("*/*", "consolidated*"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_with_listings: Any) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = Store.of(URL)
    assert place is not None
    for name in ("config.json", "model.safetensors", "notes.md", "consolidated.safetensors", "onnx/model.json"):
        place.files.pipe_file(f"{place.path}/{name}", name.encode())
    return place.files


def test_a_folder_is_copied_once_and_again_when_it_changes(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(checkpoint_folder(URL))
    assert folder.name == "one"
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        name: name for name in ("config.json", "model.safetensors")
    }
    with monkeypatch.context() as offline:
        offline.setattr(type(files), "get_file", None)
        assert checkpoint_folder(URL) == str(folder)
    files.pipe_file("/models/one/model.safetensors", b"changed")
    changed = Path(checkpoint_folder(URL))
    assert changed != folder
    assert (changed / "model.safetensors").read_text() == "changed"
    assert [entry.name for entry in changed.parent.iterdir()] == ["one"], "no remains"


def test_an_interrupted_upload_and_an_interrupted_download_are_refused(
    files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for error, text in (
        (OSError("the network is gone"), "the network is gone"),
        (
            OSError(errno.ENOSPC, "full"),
            "full.*; set TMPDIR or, for models, XDG_CACHE_HOME to a folder on a larger disk",
        ),
    ):

        def fails(*arguments: Any, error: OSError = error) -> None:
            raise error

        with monkeypatch.context() as lost:
            lost.setattr(type(files), "get_file", fails)
            with pytest.raises(ValueError, match=rf"memory://models/one cannot be read: .*{text}"):
                checkpoint_folder(URL)
    assert not any(path.name.startswith("tmp") or path.is_file() for path in tmp_path.rglob("*")), "no remains"
    assert Path(checkpoint_folder(URL)).is_dir()
    files.rm_file("/models/one/config.json")
    with pytest.raises(ValueError, match=r"or its upload was interrupted: it has no config.json"):
        checkpoint_folder(URL)
    with pytest.raises(ValueError, match=r"memory://models/two cannot be read: FileNotFoundError"):
        checkpoint_folder("memory://models/two")


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_refused(
    files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    get = type(files).get_file

    def replacing(self: Any, source: str, target: str) -> None:
        get(self, source, target)
        self.pipe_file("/models/one/config.json", b"of another version")

    with monkeypatch.context() as busy:
        busy.setattr(type(files), "get_file", replacing)
        with pytest.raises(ValueError, match=r"memory://models/one .*it was replaced while it was read"):
            checkpoint_folder(URL)
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "no remains"


@pytest.mark.parametrize("fact", ["ETag", "created", "etag", "last_modified", "Last-Modified", "blob_id"])
def test_versions_of_equal_size_differ_in_each_kind_of_store(
    files: Any, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    """Azure, HTTP servers and hubs have other facts of an object than S3."""
    value = "1"
    entry = {"name": "/models/one/config.json", "size": 11, "type": "file"}
    monkeypatch.setattr(type(files), "ls", lambda *_, **__: [{**entry, fact: value}])
    first = checkpoint_folder(URL)
    assert checkpoint_folder(URL) == first
    value = "2"
    assert checkpoint_folder(URL) != first


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s", None), ("a/b", None), ("/a/b", None), ("a/b:c", None), ("reasoning_gym:sum", None),
        (Path("memory://a/b"), "memory://a/b"), ("file:///a/b", "file:///a/b"), (Path("file:///a/b"), "file:///a/b"),
    ],
)  # fmt: skip
def test_urls_also_after_pathlib_has_had_them(path: str | Path, url: str | None) -> None:
    place = Store.of(path)
    assert (place and place.url) == url


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"nosuch://a cannot .*; for s3:// pip install s3fs"):
        Store.of("nosuch://a")


def test_the_folder_of_an_object_is_made_where_a_store_has_folders(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/new/bucket/page.html", "memory://page.html"):
        place = Store.of(url)
        assert place is not None
        place.make_parent()
        place.make_parent()
        place.files.pipe_file(place.path, b"page")
        assert place.files.cat_file(place.path) == b"page"
    assert (tmp_path / "new/bucket/page.html").read_bytes() == b"page"
