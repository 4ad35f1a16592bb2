"""A checkpoint by its URL in a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.files import Store
from parallel_models.engine import checkpoint_folder


def test_the_url_of_a_checkpoint_stands_for_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = Store.of("memory://of-hub/one")
    assert place is not None
    for name in ("config.json", "model.safetensors", "README.md", "consolidated.safetensors"):
        place.files.pipe_file(f"{place.path}/{name}", name.encode())
    folder = Path(checkpoint_folder(Path("memory://of-hub/one")))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
