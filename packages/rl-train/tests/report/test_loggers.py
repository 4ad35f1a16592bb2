"""Loggers of a run, each with its own library where that is installed; one that fails does not end the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_train.report.loggers import Loggers, check_loggers

SAMPLES = [{"line": 1, "prompt": "7 + 8 =", "response": "15", "reward": 1.0, "response_length": 2, "truncated": False}]
CONFIG = {"model": "checkpoint", "samples": 8, "critic": None}


class Mine:
    """A user's logger: it writes what it gets as lines, and fails on request."""

    def __init__(self, run: Any) -> None:
        if run.config.get("fails"):
            raise ConnectionError("no network")
        self.file = open(run.folder / "mine.jsonl", "a")  # noqa: SIM115 (closed below)
        self.put("begin", run.done, run.id)

    def put(self, *what: Any) -> None:
        self.file.write(json.dumps(what) + "\n")

    def write(self, step: int, values: Any) -> None:
        self.put("write", step, values)

    def show(self, step: int, samples: Any) -> None:
        self.put("show", step, samples)

    def close(self) -> None:
        self.file.close()


def log(name: str, folder: Path, config: dict[str, Any] = CONFIG) -> list[str]:
    """Log a run of two steps, and then its third step as a resumed run does; return the messages."""
    said: list[str] = []
    folder.mkdir(exist_ok=True)
    for done, steps in ((0, (1, 2)), (2, (3,))):
        loggers = Loggers(name, folder, config, done, said.append)
        for step in steps:
            loggers.write(step, {"reward": step / 2, "eval/pass@2": 0.5}, SAMPLES if step == 2 else [])
        loggers.close()
    return said


def test_a_logger_of_the_users(tmp_path: Path) -> None:
    assert log(f"{__name__}:Mine", tmp_path) == []
    first, *_, again, third = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert first[:2] == ["begin", 0]
    assert again == ["begin", 2, first[2]], "a resumed run has the same id"
    assert third == ["write", 3, {"reward": 1.5, "eval/pass@2": 0.5}]


def test_a_logger_that_fails_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    config = CONFIG | {"fails": True}
    said = log(f"{__name__}:Mine,tensorboard", tmp_path, config)
    once = f"the logger {__name__}:Mine failed, and the run goes on without it: ConnectionError: no network"
    assert said == [once, once], "once for each of the two commands"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "logger='wandbb' must be tensorboard, wandb, trackio, mlflow, or module:Class"),
        ("no_such_module:Mine", "logger=no_such_module:Mine needs no_such_module, which is not installed"),
    ],
)
def test_an_unknown_logger_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loggers(name)


def test_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert log("tensorboard", tmp_path) == []
    board = events.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("reward")] == [0.5, 1.0, 1.5]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert log("wandb", tmp_path / "run") == []
    (first, again) = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == again.name, "both parts are one run"
    assert b"eval/pass@2" in first.read_bytes()
    assert list(first.parent.glob("files/media/table/samples*")), "the samples are a table"


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    for name in ("trackio", "pandas"):
        pytest.importorskip(name, reason="needs trackio: pip install trackio pandas")
    assert log("trackio", tmp_path / "run") == []
    stored = b"".join(file.read_bytes() for file in (tmp_path / "trackio").rglob("*") if file.is_file())
    assert b"eval/pass@2" in stored


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    assert log("mlflow", tmp_path / "run") == []
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("rl-train").experiment_id])
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "reward")] == [0.5, 1.0, 1.5]
    assert run.data.params["samples"] == "8"
    assert run.info.status == "FINISHED"
    (shown,) = client.list_artifacts(run.info.run_id, "samples")
    assert shown.path == "samples/00000002.json"
