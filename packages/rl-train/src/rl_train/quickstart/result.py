"""The end of a quickstart: a table, and a picture of the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def result_table(result: Mapping[str, Any]) -> Table:
    """Return the table that ends a quickstart."""
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
