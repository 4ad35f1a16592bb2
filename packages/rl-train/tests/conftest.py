"""The pools of ranks and the tiny models that all tests of this package share."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

from rl_train.cluster.fork_server import prepare
from rl_train.quickstart.task import MODEL, make_checkpoint
from rl_train.rewards.function import Scores
from rl_train.rewards.worker import checked

from . import forked

EVERYTHING = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]


@pytest.fixture(scope="session", autouse=True)
def server_of_command_ranks() -> None:
    """The server that forks the ranks of commands imports once what it has when it starts: that of all commands."""
    prepare("rl_train.loop.score", "rl_train.loop.run", "rl_models.backends.transformers.load")


@pytest.fixture(scope="session", autouse=True)
def forked_programs(server_of_command_ranks: None, pytestconfig: pytest.Config) -> Iterator[None]:
    """Workers and engines are forked by the same server, except in a run with `--slow`."""
    with pytest.MonkeyPatch.context() as patch:
        if not pytestconfig.getoption("--slow"):
            program = SimpleNamespace(**vars(subprocess) | {"Popen": forked.start})
            patch.setattr("rl_train.processes.child.subprocess", program)
        yield


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """The slow imports of every command."""
    return EVERYTHING


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "letters"
    make_checkpoint(path, seed=0)
    return path


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The model with the chat template of the test's file, `TEMPLATE`."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(request.module.TEMPLATE)
    return folder


@pytest.fixture
def hybrid(model: Path, tmp_path: Path) -> Path:
    """The model with a chat template and the config of a hybrid, which its weights are not."""
    folder = Path(shutil.copytree(model, tmp_path / "hybrid"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 0, "head_dim": 8}
    config |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4}
    config |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with sizes that are multiples of 128, as vLLM's FP8 needs them."""
    path = tmp_path_factory.mktemp("models") / "blocks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL, "hidden_size", 256)
        make_checkpoint(path, seed=0)
    return path


SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
# Multiples of 128, as FP8 needs them.
EXPERTS = {
    "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models of transformers, by name."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).bfloat16(),
        "mixture": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS, tie_word_embeddings=False)),
    }
    root = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


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


@pytest.fixture
def upload() -> Iterator[Callable[[Path, str], None]]:
    """Copy a folder of this machine to a URL `memory://...`; the store is emptied at the end."""
    files = fsspec.filesystem("memory")

    def put(folder: Path, url: str) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                files.put_file(str(file), f"{url}/{file.relative_to(folder)}")

    yield put
    files.store.clear()
