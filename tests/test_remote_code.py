"""A checkpoint's own Python code does not run, and nobody is asked whether it may."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.distributions import ROOT
from tests.test_families import what_it_needs
from transformers import PreTrainedModel

from rl_models import Actor, Critic
from rl_train.data import TextCodec

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "evil"
Model, Tokenizer, Processor = LlamaForCausalLM, PreTrainedTokenizerFast, PreTrainedTokenizerFast
"""
CLASSES = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoModelForCausalLM": "evil.Model",
    "AutoModelForTokenClassification": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
    "AutoProcessor": "evil.Processor",
}


def loads(file: Path) -> Iterator[ast.Call]:
    """Yield the calls that load by one of transformers' Auto classes, or build from a config that was loaded."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value).rpartition(".")[2]
            built = node.func.attr == "from_config" and "rl_models" in file.parts
            if receiver.startswith(("Auto", "auto_class")) and (node.func.attr == "from_pretrained" or built):
                yield node


def test_every_load_refuses_code_of_a_checkpoint() -> None:
    files = [
        file
        for pattern in ("packages/*/src/**/*.py", "examples/**/*.py", "benchmarks/**/*.py")
        for file in ROOT.glob(pattern)
    ]
    calls = [(file, call) for file in files for call in loads(file)]
    assert len(calls) > 15
    asking = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file, call in calls
        if not any(
            option.arg == "trust_remote_code" and ast.unparse(option.value) == "False" for option in call.keywords
        )
    ]
    assert not asking, (
        "these calls let transformers ask whether a checkpoint's code may run; pass trust_remote_code=False"
    )


@pytest.fixture
def evil(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """`evil(model_type)`: a checkpoint with code, and a user who would answer "y"."""
    monkeypatch.setattr("builtins.input", lambda *_: (tmp_path / "asked").touch() or "y")

    def make(model_type: str) -> Path:
        folder = tmp_path / model_type
        shutil.copytree(saved("llama")[1], folder)
        (folder / "evil.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": CLASSES}))
        for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
            (folder / name).write_text(json.dumps({"auto_map": CLASSES, "processor_class": "Processor"}))
        tokens = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
        return folder

    return make


@pytest.mark.parametrize("model_type", ["llama", "evil"])
@pytest.mark.parametrize("backend", ["parallel", "transformers", "megatron"])
def test_no_backend_runs_code_of_a_checkpoint(
    evil: Callable[[str], Path], tmp_path: Path, backend: str, model_type: str
) -> None:
    folder = evil(model_type)
    with what_it_needs(backend):
        for kind in (Actor, Critic):
            if model_type == "llama":
                kind.from_pretrained(folder, backend=backend, device="cpu")
            elif backend == "transformers":
                with pytest.raises(ValueError, match=r"transformers does not read .*config.json: .*trust_remote_code"):
                    kind.from_pretrained(folder, backend=backend, device="cpu")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_prompts_are_read_without_code_of_a_checkpoint(
    evil: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    folder = evil(model_type)
    with pytest.raises(ValueError, match=r"trust_remote_code|need a chat template"):
        TextCodec(folder).chat([{"role": "user", "content": "a"}], None)
    with pytest.raises(ValueError, match=r"messages with images need"):
        TextCodec(folder).image_chat([{"role": "user", "content": [{"type": "image", "image": "a"}]}], {}, folder)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "asked").exists()
