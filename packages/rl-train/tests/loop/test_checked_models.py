"""The dtype of a run that is given none, on devices with and without GEMMs in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt import Checkpoint, layout_for, load_hf, save_hf
from rl_models.backends import BackendOptions
from rl_train.cluster.launch import Devices
from rl_train.loop import train_on
from rl_train.loop.checked_models import dtype_message, with_dtype
from rl_train.loop.checked_run import check_run
from rl_train.loop.export import export
from rl_train.loop.score import ScoreOptions, score
from rl_train.options.options import TrainOptions

CPU, GPU = Devices("cpu", "gloo", 0), Devices("cuda", "nccl", 1)
ROWS = [{"prompt": "a", "completion": "bc"}, {"prompt": "b", "completion": "cd"}]


@pytest.fixture(scope="module")
def in_bfloat16(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, layout = tmp_path_factory.mktemp("models") / "bfloat16", layout_for(model)
    save_hf(folder, load_hf(model, layout), layout, dtype=torch.bfloat16, copy_from=model)
    return folder


@pytest.fixture
def slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})


@pytest.mark.parametrize(
    ("devices", "capabilities", "dtype"),
    [
        (CPU, {"avx2": True, "amx_bf16": False, "avx512_bf16": False}, torch.float32),
        (CPU, {"architecture": "arm64", "bf16": False}, torch.float32),
        (CPU, {"amx_bf16": True, "avx512_bf16": True}, None),
        (CPU, {"avx512_bf16": True}, None),
        (CPU, {"architecture": "arm64", "bf16": True}, None),
        (GPU, {"avx2": True}, None),
    ],
)
def test_float32_replaces_bfloat16_where_it_is_faster(
    model: Path,
    in_bfloat16: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: Devices,
    capabilities: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    engine = BackendOptions(tiled_mlp=2)
    saved = None if dtype is None else torch.bfloat16
    chosen = with_dtype(engine, Checkpoint(in_bfloat16), devices)
    assert chosen == BackendOptions(tiled_mlp=2, dtype=dtype, save_dtype=saved)
    assert (dtype_message(chosen, devices) is None) == (dtype is None)
    assert with_dtype(engine, Checkpoint(model), devices) == engine
    rows = [{"text": "a", "answer": "b"}]
    options = TrainOptions(model=in_bfloat16, prompts=Path("p"), reward="exact-match", device="cpu")
    assert check_run(options, rows, devices=devices).options.engine == replace(chosen, tiled_mlp=None)
    for given in (torch.bfloat16, torch.float32, torch.float64):
        assert with_dtype(BackendOptions(dtype=given), Checkpoint(in_bfloat16), devices) == BackendOptions(dtype=given)
        is_slow = dtype is torch.float32 and given is torch.bfloat16
        assert ("is slow" in str(dtype_message(BackendOptions(dtype=given), devices))) == is_slow


@pytest.mark.usefixtures("slow_bfloat16")
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}])
def test_a_run_computes_in_float32_and_saves_in_the_dtype_of_its_model(
    in_bfloat16: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    run, events = tmp_path / "run", list[Any]()
    options: dict[str, Any] = {"device": "cpu", "steps": 1, "batch_size": 2, "learning_rate": 0.01, "out": run, **lora}
    train_on(in_bfloat16, ROWS, recipe="sft", on_event=events.append, **options)
    assert any("dtype=float32: this CPU" in event.get("message", "") for event in events)
    assert json.loads((run / "options.json").read_text())["engine.dtype"] is None  # another machine chooses again
    step = run / "training" / "actor" / "step-00000001"
    trained = {weight.dtype for file in step.glob("*.safetensors") for weight in load_file(file).values()}
    assert torch.bfloat16 not in trained
    export(run, tmp_path / "exported", lambda done, total: None)
    before = load_file(in_bfloat16 / "model.safetensors")
    weights, exported = (load_file(folder / "model.safetensors") for folder in (run / "actor", tmp_path / "exported"))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert any(not torch.equal(before[name], weight) for name, weight in weights.items())
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert json.loads((run / "actor" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.usefixtures("slow_bfloat16")
def test_scores_are_those_of_float32(in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = list[BackendOptions]()
    monkeypatch.setattr(
        "rl_train.loop.score.run_on_ranks", lambda work, n, options, *_, **__: engines.append(options.engine)
    )
    score(ScoreOptions(in_bfloat16, device="cpu"), [[1, 2]], lambda record: None)
    assert [engine.dtype for engine in engines] == [torch.float32]
