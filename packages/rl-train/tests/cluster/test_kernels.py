from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_train.cluster.kernels import keep_compiled_kernels

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
QUACK_FOLDER = "QUACK_CACHE_DIR"


def test_kernels_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (ENABLED, FOLDER, QUACK_FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_kernels()
    assert os.environ[ENABLED] == "1"
    assert all(Path(os.environ[folder]).is_relative_to(tmp_path) for folder in (FOLDER, QUACK_FOLDER))


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "0")
    monkeypatch.setenv(FOLDER, "/elsewhere")
    keep_compiled_kernels()
    assert (os.environ[ENABLED], os.environ[FOLDER]) == ("0", "/elsewhere")
