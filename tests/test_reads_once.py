"""A load reads config.json, the index and the header of each file of a checkpoint once on each rank."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
from tests.test_families import what_it_needs
from transformers import AutoConfig

import ckpt
from ckpt import Checkpoint, Grid, layout_for, load_hf, merge, reshard, verify
from hf_patches.testing import tiny_model
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_models import EngineOptions, Grid as RankGrid, load_engine
from rl_models import Actor, Critic
from rl_train.planner import MemoryOptions, plan_memory

_opened: list[Path] = []


@cache
def _watch() -> None:
    """Note each JSON file that Python opens, and each header that safetensors reads; both go on until the end."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).endswith(".json"):
            _opened.append(Path(arguments[0]))

    sys.addaudithook(note)
    original = safetensors.safe_open

    def safe_open(path: Any, *arguments: Any, **options: Any) -> Any:
        _opened.append(Path(path))
        return original(path, *arguments, **options)

    for module in (safetensors, safetensors.torch, sys.modules["ckpt.files.header"]):
        module.safe_open = safe_open


@contextmanager
def reads(folder: Path) -> Iterator[Counter[str]]:
    """Yield a count of the readings of each file in a folder, which is complete after the body."""
    _watch()
    _opened.clear()
    counted: Counter[str] = Counter()
    yield counted
    counted.update(path.name for path in _opened if path.parent == folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(family)`: a checkpoint with an index and several files."""

    @cache
    def save(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(path, max_shard_size="20KB")
        return path

    return save


def once(folder: Path) -> dict[str, int]:
    """Return the count of a reading of every description in a folder."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*config.json"), *folder.glob("*.index.json")]
    assert len(files) > 4
    return {file.name: 1 for file in files}


@pytest.mark.parametrize("kind", [Actor, Critic])
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
@pytest.mark.parametrize("backend", ["parallel", "transformers", "megatron"])
def test_a_worker(folder: Callable[[str], Path], family: str, backend: str, kind: type[Actor | Critic]) -> None:
    path = folder(family)
    with reads(path) as counted, what_it_needs(backend):
        kind.from_pretrained(path, backend=backend, device="cpu")
    # transformers reads config.json for its own models and towers.
    own = backend == "transformers" or (family, backend) == ("qwen3_vl", "parallel")
    assert counted == {**once(path), "config.json": 1 + own}


@pytest.mark.parametrize("backend", ["parallel", "transformers", "megatron"])
def test_an_adapter(folder: Callable[[str], Path], backend: str, tmp_path: Path) -> None:
    with what_it_needs("megatron"):
        actor = Actor.from_pretrained(folder("llama"), device="cpu", lora=LoraOptions(2, targets=("q_proj",)))
        actor.save_adapter(tmp_path)
    with reads(tmp_path) as counted, what_it_needs(backend):
        Actor.from_pretrained(folder("llama"), backend=backend, device="cpu", lora=tmp_path)
    assert counted == {"adapter_config.json": 1, "adapter_model.safetensors": 1}


def native(path: Path) -> None:
    grid = RankGrid.build(ParallelDims(), device="cpu")
    load_engine(path, "causal_lm", grid, EngineOptions())


def planned(path: Path) -> None:
    plan_memory(Checkpoint(path), MemoryOptions(dims=ParallelDims(tp=2), tokens=64), role="causal_lm", trained=True)


def whole(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    load_hf(checkpoint, layout_for(checkpoint))


@pytest.mark.parametrize(
    "read",
    [
        native,
        planned,
        whole,
        lambda path: verify(path, path.parent / "other"),
        lambda path: merge(path, path.parent / "other", max_shard_size="50KB"),
        lambda path: reshard(path, path.parent / "shards", Grid(tp=2)),
    ],
    ids=["native", "planned", "load", "verify", "merge", "reshard"],
)
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_other_readers(folder: Callable[[str], Path], family: str, read: Callable[[Path], None]) -> None:
    path = folder(family)
    other = path.parent / "other"
    if not other.exists():
        merge(path, other)
    with reads(path) as counted:
        read(path)
    expected = once(path)
    del expected["generation_config.json"]  # of interest only to those that copy the folder
    if read is planned and family == "llama":
        expected = {"config.json": 1}
    assert {name: count for name, count in counted.items() if name != "generation_config.json"} == expected


def test_a_second_reading_is_counted(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    with reads(path) as counted:
        AutoConfig.from_pretrained(path)
        Checkpoint.open(path)
        ckpt.layout_for(path)
        Checkpoint.open(path)
    assert counted["config.json"] == 4
    assert {count for name, count in counted.items() if name != "config.json"} == {2}
