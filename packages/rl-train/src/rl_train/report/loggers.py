"""Loggers of a run: TensorBoard, wandb, trackio, mlflow, or a user's class, behind one small interface.

Each logger runs in its own thread, so that a slow network does not stop the run.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_train.options.functions import find_in_working_folder
from rl_train.report.metrics_server import MetricsServer

# The file of a run's id in loggers, in its folder.
IDENTITY = ".logged-run"
# Seconds that the end of a run waits for each logger.
_PATIENCE = 60.0


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is made for.

    Attributes:
        folder: The folder of the run.
        config: The options of the run, as JSON values.
        done: The number of steps that are done; 0 for a run that begins.
        id: A unique id of the run, which a resumed run keeps.
    """

    folder: Path
    config: Mapping[str, Any]
    done: int
    id: str


@dataclass(frozen=True)
class Logger:
    """A logger, which is made for a `LoggedRun`; a class of a user has methods of these names.

    All calls come from one thread, in order.

    Attributes:
        write: Takes a step and its metrics.
        show: Takes a step and its samples: lines of `samples.jsonl`, all with the same keys.
        close: Ends the log of the run.
    """

    write: Callable[[int, Mapping[str, float]], object]
    show: Callable[[int, Sequence[Mapping[str, Any]]], object]
    close: Callable[[], object]


def _tensorboard(run: LoggedRun) -> Logger:
    """Write events into the folder `tensorboard` of the run."""
    from torch.utils.tensorboard import SummaryWriter  # an extra

    board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.done + 1)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, step)

    def show(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        lines = [f"    {sample['reward']:g}: {sample['prompt']!r} {sample['response']!r}" for sample in samples]
        board.add_text("samples", "\n\n".join(lines), step)

    return Logger(write, show, board.close)


def _wandb(run: LoggedRun) -> Logger:
    """Log to Weights & Biases; WANDB_PROJECT, WANDB_MODE=offline and its other variables are read."""
    wandb = importlib.import_module("wandb")
    project, identity = os.environ.get("WANDB_PROJECT", "rl-train"), {"id": run.id, "resume": "allow"}
    wandb_run = wandb.init(
        project=project, name=run.folder.name, dir=str(run.folder), config=dict(run.config), **identity
    )
    # A resumed run writes steps again, which wandb's own count of steps does not allow.
    wandb_run.define_metric("*", step_metric="step")

    def show(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[str(value) for value in sample.values()] for sample in samples]
        wandb_run.log({"step": step, "samples": wandb.Table(columns=list(samples[0]), data=rows)})

    return Logger(lambda step, values: wandb_run.log({"step": step, **values}), show, wandb_run.finish)


def _trackio(run: LoggedRun) -> Logger:
    """Log to trackio; TRACKIO_PROJECT and its other variables are read."""
    trackio, pandas = importlib.import_module("trackio"), importlib.import_module("pandas")
    project, name = os.environ.get("TRACKIO_PROJECT", "rl-train"), f"{run.folder.name}-{run.id[:6]}"
    trackio_run = trackio.init(project=project, name=name, config=dict(run.config), resume="allow")

    def show(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        table = trackio.Table(dataframe=pandas.DataFrame(list(samples)).astype(str))
        trackio_run.log({"samples": table}, step=step)

    return Logger(lambda step, values: trackio_run.log(dict(values), step=step), show, trackio_run.finish)


def _mlflow(run: LoggedRun) -> Logger:
    """Log to MLflow; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables are read."""
    mlflow = importlib.import_module("mlflow")
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "rl-train"))
    filter_text, client = f"tags.`rl_train.id` = '{run.id}'", mlflow.MlflowClient()
    earlier_runs = client.search_runs([experiment.experiment_id], filter_text) if run.done else []
    if earlier_runs:
        mlflow.start_run(run_id=earlier_runs[0].info.run_id)
    else:
        mlflow.start_run(run_name=run.folder.name, tags={"rl_train.id": run.id})
        mlflow.log_params(dict(run.config))

    def write(step: int, values: Mapping[str, float]) -> None:
        # MLflow refuses "@" in names of metrics.
        mlflow.log_metrics({name.replace("@", "-at-"): float(value) for name, value in values.items()}, step=step)

    def show(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        mlflow.log_dict({"samples": [dict(sample) for sample in samples]}, f"samples/{step:08d}.json")

    return Logger(write, show, mlflow.end_run)


# The function that makes each logger, and its package on PyPI. Their pins exclude each other, so one alone is an extra.
LOGGERS: dict[str, tuple[Callable[[LoggedRun], Logger], str]] = {
    "tensorboard": (_tensorboard, "tensorboard"),
    "wandb": (_wandb, "wandb"),
    "trackio": (_trackio, "trackio pandas"),
    "mlflow": (_mlflow, "mlflow-skinny"),
}


def names(text: str) -> list[str]:
    """Return the loggers of `--logger`, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_loggers(text: str) -> None:
    """Raise ValueError for a logger that is unknown, or whose library is not installed."""
    find_in_working_folder()
    for name in names(text):
        if name not in LOGGERS and ":" not in name:
            raise ValueError(f"logger={name!r} must be {', '.join(LOGGERS)}, or module:Class, such as logs:Mine")
        module = name.partition(":")[0]
        try:
            missing = find_spec(module) is None
        except (ImportError, ValueError):  # a package around the module is missing, or the module is blocked
            missing = True
        if missing:
            fix = f"pip install {LOGGERS[name][1]}" if name in LOGGERS else "put it into the working directory"
            raise ValueError(f"logger={name} needs {module}, which is not installed; {fix}")


class Loggers:
    """The loggers of a run. A logger that fails is named once, and the run goes on without it.

    Args:
        text: The value of `--logger`.
        folder, config, done: See `LoggedRun`.
        tell: Called with a message about a logger that failed.
        port: The port for Prometheus; 0: none.
    """

    def __init__(
        self,
        text: str,
        folder: Path,
        config: Mapping[str, Any],
        done: int,
        tell: Callable[[str], None],
        port: int = 0,
    ) -> None:
        self._server = MetricsServer(port) if port else None
        self._tell, self._threads = tell, list[_Background]()
        if logger_names := names(text):
            run = LoggedRun(folder, config, done, _identity(folder, done))
            self._threads = [_Background(name, run) for name in logger_names]

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Give the metrics and samples of a step to all loggers; returns at once."""
        if self._server is not None:
            self._server.write(step, values)
        for thread in self._threads:
            thread.calls.put(("write", step, dict(values)))
            if samples:
                thread.calls.put(("show", step, list(samples)))
        self._drop_failed()

    def close(self) -> None:
        """End all loggers, and wait for each up to a minute."""
        if self._server is not None:
            self._server.close()
        for thread in self._threads:
            thread.calls.put(("close",))
        for thread in self._threads:
            thread.join(_PATIENCE)
            if thread.is_alive():
                self._tell(f"the logger {thread.name} has not ended in {_PATIENCE:g} s; its last lines may be missing")
        self._drop_failed()

    def _drop_failed(self) -> None:
        for thread in self._threads:
            if thread.error is not None:
                self._tell(f"the logger {thread.name} failed, and the run goes on without it: {thread.error}")
        self._threads = [thread for thread in self._threads if thread.error is None]


class _Background(threading.Thread):
    """The thread of a logger; `error` is the reason why it ended early."""

    def __init__(self, name: str, run: LoggedRun) -> None:
        super().__init__(name=name, daemon=True)
        self.calls = queue.SimpleQueue[tuple[Any, ...]]()
        self.error: str | None = None
        self._run_of_logger = run
        self.start()

    def run(self) -> None:
        """Make the logger, and call it until it is closed or fails."""
        try:
            logger = _made(self.name)(self._run_of_logger)
            method = ""
            while method != "close":
                method, *arguments = self.calls.get()
                getattr(logger, method)(*arguments)
        except (Exception, SystemExit) as error:
            self.error = f"{type(error).__name__}: {error}"


def _made(name: str) -> Callable[[LoggedRun], Logger]:
    if name in LOGGERS:
        return LOGGERS[name][0]
    module, _, attribute = name.partition(":")
    logger_class: Callable[[LoggedRun], Logger] = getattr(importlib.import_module(module), attribute)
    return logger_class


def _identity(folder: Path, done: int) -> str:
    """Return the id of a run, which its folder keeps; a run that begins has a new one."""
    file = folder / IDENTITY
    if not (done and file.is_file()):
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8")
