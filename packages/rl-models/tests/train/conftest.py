from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_models.quickstart.task import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "letters"
    make_checkpoint(path, seed=0)
    return path


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A letter a line."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcdefghijkl"))
    return path


@pytest.fixture
def folder_of_rewards(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs in the folder that has the module `rewards`, as a user would."""
    folder = Path(__file__).parent
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder
