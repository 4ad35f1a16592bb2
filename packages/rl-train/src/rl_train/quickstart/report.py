"""What the user sees of a quickstart: progress, a table, a picture of the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """Progress on standard error: a bar on a terminal, else a line for every tenth of the run."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.steps = steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.3f}  {task.fields[sample]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("learning", total=steps, reward=0.0, sample="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def step(self, event: Mapping[str, Any]) -> None:
        """One step has been learned."""
        done = event["step"]
        self._bar.update(self._task, completed=done, reward=event["reward"], sample=event["sample"])
        if not self.console.is_terminal and (done % max(1, self.steps // 10) == 0 or done == self.steps):
            self.say(
                f"step {done}/{self.steps}  reward {event['reward']:.3f}  entropy {event['entropy']:.2f}  "
                f"sample {event['sample']}"
            )


def result_table(result: Mapping[str, Any]) -> Table:
    """The final table of a quickstart's result."""
    table = Table(title="rl-train quickstart", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    rows = {
        "ranks": result["ranks"],
        "log-probs, actor against transformers": f"max |difference| {result['parity_max_abs']:.1e}",
        "log-probs, saved actor reloaded by transformers": f"max |difference| {result['reload_max_abs']:.1e}",
        "mean reward, first tenth -> last tenth": f"{result['reward_first']:.3f} -> {result['reward_last']:.3f}",
        "a response of the last step": result["sample"],
        "tokens/s (generated and learned)": f"{result['tokens_per_second']:,.0f}",
        "seconds in all": f"{result['seconds']:.1f}",
        "actor's checkpoint": result["checkpoint"],
        "reward curve": result["curve"],
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def save_curve(path: Path, rewards: Sequence[float]) -> None:
    """Draw the mean reward of every step, and its mean over a tenth of the run, as a PNG."""
    # An import of half a second that only this function needs.
    from matplotlib.figure import Figure

    window = max(1, len(rewards) // 10)
    smooth = [sum(rewards[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="#9ecae1", label="mean reward of a step")
    axes.plot(steps, smooth, color="#08519c", label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="Learning to go on with the alphabet")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
