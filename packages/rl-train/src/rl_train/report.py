"""Report a run: metrics as JSON lines, TensorBoard events, progress on a terminal, and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ckpt.files.disk import room_for
from rl_train.data.prompts import parse_json

# The files of lines in the folder of a run.
LINES = ("metrics.jsonl", "samples.jsonl")


class StepLines:
    """A file of JSON lines, `{"step": n, name: value, ...}`; a resumed run drops the lines of steps that run again.

    Attributes:
        path: The file.
        last: The last line that is left, without its step; empty without one.
    """

    def __init__(self, path: Path, *, done: int) -> None:
        self.path = path
        # A run that starts anew evaluates before step 1 anew.
        kept = [record for record in read_lines(path) if done and record["step"] <= done]
        replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self.last = {name: value for name, value in kept[-1].items() if name != "step"} if kept else {}

    def write(self, step: int, *lines: Mapping[str, Any]) -> None:
        """Append lines of a step; the file is closed when this returns."""
        text = "".join(json.dumps({"step": step, **values}) + "\n" for values in lines)
        with room_for(len(text), self.path.parent), open(self.path, "a", encoding="utf-8") as file:
            file.write(text)


class Metrics:
    """Write `metrics.jsonl`, `samples.jsonl` and, on request, TensorBoard events into one folder.

    Attributes:
        last: The metrics of the last finished step; empty without one.
    """

    def __init__(self, folder: Path, *, done: int, tensorboard: bool) -> None:
        self._metrics, self._samples = (StepLines(folder / name, done=done) for name in LINES)
        self.last: dict[str, float] = self._metrics.last
        self._board: Any = None
        if tensorboard:
            self._board = summary_writer()(str(folder / "tensorboard"), purge_step=done + 1)

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append the metrics of a step as one line, and each of its samples as one."""
        # The metrics come last: a step that has them is complete.
        self._samples.write(step, *samples)
        self._metrics.write(step, values)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the events that TensorBoard's writer still holds."""
        if self._board is not None:
            self._board.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of one of `LINES`, or an empty list without the file; a wrong line is a ValueError."""
    if not path.is_file():
        return []
    # A kill may cut the last line short; its step comes after the last checkpoint and runs again.
    *whole, _ = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(whole, start=1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not (isinstance(record, dict) and type(record.get("step")) is int):
            raise ValueError(f"{path}, line {number}: not a line of a step; remove it, or choose another out")
        found.append(record)
    return found


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically; after a kill the old file is complete, and the next call replaces the temporary."""
    temporary = path.with_name(f".{path.name}.saving")
    with room_for(len(text), path.parent):
        temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def summary_writer() -> Any:
    """Return TensorBoard's writer; raise ValueError where the extra `rl-train[tensorboard]` is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs TensorBoard; pip install 'rl-train[tensorboard]'") from None
    return SummaryWriter


class Display:
    """Show progress on standard error: a bar on a terminal, else a line for every tenth of the run."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console, self.steps = console or Console(stderr=True), steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.3f}  {task.fields[sample]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, reward=0.0, sample="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show a message, or the metrics of a step."""
        if "message" in event:
            self.console.print(event["message"], highlight=False, soft_wrap=True, markup=False)
            return
        done, reward, sample = int(event["step"]), float(event["reward"]), _short(event["sample"])
        self._bar.update(self._task, completed=done, reward=reward, sample=sample)
        if not self.console.is_terminal and (done % max(1, self.steps // 10) == 0 or done == self.steps):
            text = f"step {done}/{self.steps}  reward {reward:.3f}  response length {event['response_length']:.1f}"
            self.console.print(f"{text}  {sample}", highlight=False, soft_wrap=True, markup=False)


def _short(sample: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(sample.split())
    return line if len(line) <= 40 else f"{line[:39]}…"


def two_columns(values: Mapping[str, Any], title: str) -> Table:
    """Return a table of names and values in two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name, "" if value is None else shown)
    return table
