"""The pools of ranks that all tests of compositions share.

The process that starts the workers of pytest-xdist loads this file, too: torch and transformers are imported later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.parity_record import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Transformer Engine asks cuBLAS for TF32, whose operands have 11 bits, wherever it is given fp32. This keeps fp32 fp32;
# cuBLAS reads it when it is first used, so it is set before any rank starts.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


def pytest_configure(config: pytest.Config) -> None:
    """Record the outcomes of parity cases on request."""
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder())


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """The slow imports of every command."""
    return ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """`saved("llama", vocab_size=64)`: a tiny model of the family, and the folder that it is saved in; made once."""
    from hf_patches.testing import tiny_model

    @cache
    def save(family: str, **overrides: Any) -> tuple[PreTrainedModel, Path]:
        folder = tmp_path_factory.mktemp(family)
        model = tiny_model(family, **overrides).eval()
        model.save_pretrained(folder)
        return model, folder

    return save
