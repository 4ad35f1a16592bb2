"""`Vllm` with a stand-in for the library: the arguments that vLLM gets, and refusals."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_train.rollouts import Vllm


class LLM:
    """Keeps its arguments."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 32)
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(model_config=config, engine_core=core)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("vllm")
    found.__spec__, found.LLM = ModuleSpec("vllm", None), LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", found)
    monkeypatch.setattr("rl_train.rollouts.vllm._ENVIRONMENT", {})
    monkeypatch.setattr("rl_train.rollouts.vllm._NEEDED", {})


def test_a_process_has_one_open_engine(model: Path) -> None:
    first = Vllm(model)
    with pytest.raises(
        ValueError, match=r"has a vLLM engine already, of .*letters.* close the first, or start each in"
    ):
        Vllm(model)
    first.close()
    second = Vllm(model)
    del second  # nobody can close it any more
    Vllm(model).close()
