"""The pools of ranks that all tests of this package share, and a hypothesis profile without deadlines."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from parallel_layers import ParallelDims
from rl_train.cluster.launch import prepare, slow_imports
from rl_train.quickstart.task import MODEL, make_checkpoint
from rl_train.rewards.function import Scores
from rl_train.rewards.worker import checked

settings.register_profile("shared-machine", deadline=None, max_examples=50)
settings.load_profile("shared-machine")


EVERYTHING = slow_imports(ParallelDims(dp=2, pp=2))


@pytest.fixture(scope="session", autouse=True)
def server_of_command_ranks() -> None:
    """The server that forks the ranks of commands imports once what it has when it starts: that of all commands."""
    prepare("rl_train.loop.score", "rl_train.loop.run", "rl_models.backends.transformers.load", *EVERYTHING)


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """The slow imports of every command."""
    return EVERYTHING


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "letters"
    make_checkpoint(path, seed=0)
    return path


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with sizes that are multiples of 128, as vLLM's FP8 needs them."""
    path = tmp_path_factory.mktemp("models") / "blocks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL, "hidden_size", 256)
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


@pytest.fixture
def in_process() -> Callable[[Callable[..., Any]], Any]:
    """Make the rewards of a loop of a function of the test, which is called in the test's process."""

    def make(reward: Callable[..., Any]) -> Any:
        def score(items: Any, places: Any) -> Scores:
            found = [checked(reward(*item)) for item in items]
            return Scores([one.reward for one in found], {}, answers=[one.answer for one in found])

        return SimpleNamespace(score=score)

    return make
