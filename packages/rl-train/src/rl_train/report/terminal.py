"""`Display`: show a run as a live panel on a terminal, elsewhere as lines; and tables for the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ckpt.cli import printable

_COMPILES = "compiling kernels, capturing CUDA graphs"
# Phase -> its title, and the work of an accelerator in its first run.
PHASES: dict[str, tuple[str, str]] = {
    "starting": ("starting the ranks", ""),
    "loading": ("loading the models", ""),
    "starting the rollouts": ("starting the engines of the rollouts", f"loading the model, {_COMPILES}"),
    "generating": ("generating", _COMPILES),
    "scoring": ("scoring", ""),
    "estimating": ("computing log-probs", "compiling kernels"),
    "learning": ("learning", "compiling kernels, allocating the optimizer's state"),
    "syncing_weights": ("syncing the weights with the engine", ""),
    "evaluating": ("evaluating", _COMPILES),
    "saving": ("saving", ""),
}
# The numbers of the panel: label, metric, and how it is shown.
NUMBERS: tuple[tuple[str, str, str], ...] = (
    ("loss", "loss", ".4f"),
    ("held-out loss", "eval/loss", ".4f"),
    ("accuracy", "reward_accuracy", ".3f"),
    ("reward", "reward", ".3f"),
    ("held-out", "eval/reward", ".3f"),
    ("KL", "kl", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("length", "response_length", ".1f"),
    ("cut off", "truncated", ".1%"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("s/step", "seconds", ".2f"),
)
# The numbers of a row below them, where a run has them.
RATES: tuple[tuple[str, str, str], ...] = (
    ("tokens/s/device", "tokens_per_second_per_device", ",.0f"),
    ("MFU", "mfu", ".1%"),
    ("learning", "mfu_learning", ".1%"),
)
_BARS = "▁▂▃▄▅▆▇█"


class Counts:
    """A `parallel_models.engine.Progress` that sends counts as events: at most ten a second, and the last count."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._tell, self._next = tell, dict[str, float]()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Send a count, unless the previous one was sent less than 0.1 s ago."""
        now = time.monotonic()
        if now >= self._next.get(what, 0.0) or done == total:
            self._next[what] = now + 0.1
            self._tell({"count": what, "done": done, "total": total})


class Display:
    """Show the events of a run on standard error.

    An event has one of these keys: `message`, with `resumed` where a run goes on after that step; `phase`, a key of
    `PHASES`, with `accelerator` where kernels are compiled; `count`, with `done` and `total`; or `step`, with the
    step's metrics, a `sample`, a `prompt` with its `response`, and the `warnings_shown`, those that hold now.

    Args:
        steps: The number of steps.
        console: The console (default: standard error).
        title: The title of the panel.
    """

    def __init__(self, steps: int, console: Console | None = None, title: str = "rl-train") -> None:
        self.console, self.steps, self.title = console or Console(stderr=True), steps, title
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps)
        self._phase, self._since, self._accelerator = "", time.monotonic(), False
        self._counts: dict[str, tuple[int, int]] = {}
        self._took: dict[str, float] = {}
        self._values: dict[str, Any] = {}
        self._headline, self._curve = "reward", list[float]()
        self._spinner = Spinner("dots")
        # Only a terminal has a panel; its thread draws, and no caller waits for it.
        self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._begin("")
        if self.console.is_terminal:
            self._live.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        self._values = self._values | {name: event[name] for _, name, _ in (*NUMBERS, *RATES) if name in event}
        if "message" in event:
            self._bar.update(self._task, completed=event.get("resumed", self._bar.tasks[0].completed))
            self._print(event["message"])
        elif "phase" in event:
            self._accelerator |= event.get("accelerator", False)
            self._begin(event["phase"])
        elif "count" in event:
            self._counts = self._counts | {event["count"]: (event["done"], event["total"])}
        elif "step" in event:
            self._step(event)

    def _begin(self, phase: str) -> None:
        """Begin a phase, and remember how long the last one took."""
        now = time.monotonic()
        first = phase not in self._took and phase != self._phase
        self._took = self._took | {self._phase: now - self._since}
        self._phase, self._since, self._counts = phase, now, {}
        title, note = PHASES.get(phase, (phase, ""))
        if first and title and not self.console.is_terminal:
            self._print(f"{title}, for the first time: {note}" if note and self._accelerator else title)

    def _step(self, event: Mapping[str, Any]) -> None:
        self._headline = headline = event.get("headline", self._headline)
        done, value = int(event["step"]), float(event[headline])
        if not self._curve and done > 1:
            self._bar.reset(self._task, completed=done - 1)  # a resumed run: earlier steps do not count for the speed
        self._bar.update(self._task, completed=done)
        self._curve = [*self._curve, value][-24:]
        self._values = self._values | {"nothing": event.get("nothing", False), "signs": event.get("warnings_shown", [])}
        held_out = f"  held-out {event[f'eval/{headline}']:.3f}" if f"eval/{headline}" in event else ""
        is_reported = held_out or done % max(1, self.steps // 10) == 0 or done == self.steps
        if not self.console.is_terminal and is_reported:
            text = f"step {done}/{self.steps}  {headline} {value:.3f}{held_out}"
            if "sample" in event:
                asked, response = short(event["sample"]["prompt"], end=True), short(event["sample"]["response"])
                text += f"  response length {event['response_length']:.1f}  {asked} -> {response}"
            self._print(text)
        for line in _lines_of(event.get("samples", ())):
            self._print(line)

    def _print(self, text: str) -> None:
        self.console.print(_text(text), soft_wrap=True)

    def _panel(self) -> Panel:
        """Return the current panel; called by the thread that draws."""
        phase, counts, values = self._phase, self._counts, self._values
        title, note = PHASES.get(phase, (phase, ""))
        status = f"{title or 'done'}"
        for what, (done, total) in counts.items():
            status += f"  {done:,} of {total:,} {what}" if total else f"  {done:,} {what}"
        if phase:
            status += f"  {time.monotonic() - self._since:.1f} s"
        if phase and phase in self._took:
            status += f" (last time {self._took[phase]:.1f} s)"
        elif note and self._accelerator:
            status += f" (first time: {note})"
        self._spinner.update(text=Text(status, overflow="ellipsis", no_wrap=True))
        numbers = Table.grid(padding=(0, 1), expand=True)
        for _ in range(4):
            numbers.add_column(style="dim")
            numbers.add_column(justify="right")
        numbers_of_run = NUMBERS[3:] if self._headline == "reward" else (*NUMBERS[:3], *NUMBERS[6:7], *NUMBERS[-2:])
        cells = [(label, f"{values[name]:{kind}}" if name in values else "-") for label, name, kind in numbers_of_run]
        rates = [(label, f"{values[name]:{kind}}") for label, name, kind in RATES if name in values]
        for row in filter(None, (cells[:4], cells[4:], rates)):
            numbers.add_row(*(text for cell in row for text in cell))
        rows: list[Any] = [self._bar, self._spinner if phase else Text(status), numbers]
        if self._curve:
            rows.append(Text(f"{self._headline} {sparkline(self._curve)}", style="dim"))
        if values.get("nothing"):
            rows.append(Text("equal rewards: the policy learned nothing from the last step", style="red"))
        rows += [Text(text, style="yellow") for text in values.get("signs", ())]
        return Panel(Group(*rows), title=_text(self.title), title_align="left")


def sparkline(numbers: Sequence[float]) -> str:
    """Return a line of bars, from the lowest to the highest number."""
    low, high = min(numbers), max(numbers)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((number - low) * scale)] for number in numbers)


def _lines_of(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the samples of a step as lines: each prompt, and below it its best and its worst response."""
    lines, line = list[str](), None
    for sample in samples:
        if sample["line"] != line:
            lines.append(f"prompt {sample['line']}: {short(str(sample['prompt']), 66, end=True)}")
            line = sample["line"]
        lines.append(f"  {sample['reward']:8.3f}  {short(str(sample['response']), 66)}")
    return lines


def short(text: str, length: int = 24, *, end: bool = False) -> str:
    """Return the beginning or the end of a text, on one line."""
    line = printable(" ".join(text.split()))
    if len(line) <= length:
        return line
    return f"…{line[1 - length :]}" if end else f"{line[: length - 1]}…"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in s: "1 step", "3 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def two_columns(values: Mapping[str, Any], title: str) -> Table:
    """Return a table of names and values in two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(_text(name), _text("" if value is None else shown))
    return table


def columns_of_runs(title: str, runs: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> Table:
    """Return a table with a row for each name and a column for each run."""
    table = Table("", title=title, title_justify="left")
    for run in runs:
        table.add_column(_text(run), overflow="fold")
    for name, values in rows.items():
        table.add_row(_text(name), *(_text("" if value is None else str(value)) for value in values))
    return table


def _text(text: str) -> Text:
    """Return a foreign text without markup: in a plain string the console would interpret brackets and colons."""
    return Text(printable(text))
