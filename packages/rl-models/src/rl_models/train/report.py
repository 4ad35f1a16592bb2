"""What a run tells: metrics as JSON lines, TensorBoard's events, and progress on a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class Metrics:
    """`metrics.jsonl` and, on request, TensorBoard's events in one folder.

    A line is `{"step": n, name: number, ...}`. Made again for a run that is resumed, it drops the lines of steps that
    will run again.
    """

    def __init__(self, folder: Path, *, done: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        self._keep(done)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._board: Any = None
        if tensorboard:
            self._board = summary_writer()(str(folder / "tensorboard"), purge_step=done + 1)

    def _keep(self, done: int) -> None:
        if not self.path.is_file():
            return
        # A line that a kill has cut short is of a step after the last checkpoint.
        whole = [line for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1:] == "\n"]
        temporary = self.path.with_suffix(".part")
        temporary.write_text("".join(line for line in whole if json.loads(line)["step"] <= done), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line, on the disk when this returns."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def summary_writer() -> Any:
    """The class that writes TensorBoard's events, which only the extra `rl-models[tensorboard]` brings.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs TensorBoard; pip install 'rl-models[tensorboard]'") from None
    return SummaryWriter


class Display:
    """Progress on standard error: a bar on a terminal, else a line for every tenth of the run."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console, self.steps = console or Console(stderr=True), steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.3f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, reward=0.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """A message, or the metrics of a step."""
        if "message" in event:
            self.console.print(event["message"], highlight=False, soft_wrap=True)
            return
        done, reward = int(event["step"]), float(event["reward"])
        self._bar.update(self._task, completed=done, reward=reward)
        if not self.console.is_terminal and (done % max(1, self.steps // 10) == 0 or done == self.steps):
            text = f"step {done}/{self.steps}  reward {reward:.3f}  response length {event['response_length']:.1f}"
            self.console.print(text, highlight=False, soft_wrap=True)


def plan_table(values: Mapping[str, Any], title: str) -> Table:
    """Names and values in two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, "" if value is None else str(value))
    return table
