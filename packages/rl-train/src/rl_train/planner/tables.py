"""The tables of `rl-train plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from rich.table import Table

from rl_train.planner.memory import GIB, Memory
from rl_train.planner.models import Planned, dims_text, savings_text

# Line breaks of the headings: a terminal of 80 columns then shows every number whole.
HEADINGS = {
    "optimizer": "opti-\nmizer",
    "gradients": "gradi-\nents",
    "gathered": "gath-\nered",
    "activations": "activa-\ntions",
}
# Fields with a line each instead of a column, and what they hold.
_LINES = {
    "host": "of optimizer state in host memory",
    "masks": "of sampling masks",
    "states": "of a teacher's hidden states",
}


def memory_tables(planned: Planned, limit: int | None, fits: Sequence[Planned]) -> Iterator[Table | str]:
    """Yield the tables of memory: each model on each stage, the peak, and with a limit (bytes) the grids that fit."""
    columns = [entry.name for entry in fields(Memory) if entry.name not in {*_LINES, "cache", "generation"}]
    savings = savings_text(planned.options)
    title = f"GiB on a rank of {dims_text(planned.options.dims)}, {planned.options.tokens} tokens, {savings}"
    table = Table(title=title, box=None, collapse_padding=True, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("stage", justify="right")
    for name in (*columns, "total"):
        table.add_column(HEADINGS.get(name, name), justify="right", overflow="fold")
    for model, stages in planned.models.items():
        for number, memory in enumerate(stages):
            cells = [getattr(memory, name) for name in columns]
            table.add_row(model, str(number), *(f"{cell / GIB:.2f}" for cell in (*cells, memory.total)))
    yield table
    for model, stages in planned.models.items():
        for number, memory in enumerate(stages):
            for name, text in _LINES.items():
                if value := getattr(memory, name):
                    yield f"{model}, stage {number}: {value / GIB:.2f} GiB {text}"
            if memory.cache:
                yield (
                    f"{model}, stage {number}, while it generates: {memory.cache / GIB:.2f} GiB of keys and values, "
                    f"{memory.generation / GIB:.2f} GiB of gathered weights, a layer and logits"
                )
    how = "one model on the devices, the others offloaded" if planned.offload else "all on the same devices"
    yield f"peak: {planned.peak / GIB:.2f} GiB, {how}"
    if limit is None:
        return
    verdict = "fits" if planned.peak <= limit else "does not fit"
    yield f"{dims_text(planned.options.dims)} {verdict} {limit / GIB:.2f} GiB"
    if not fits:
        yield "none of the tried grids fits"
        return
    ranks = fits[0].options.dims.world_size
    yield f"grids of {ranks} rank{'s' * (ranks > 1)} on which it fits, the fastest first:"
    grids = Table(box=None, pad_edge=False)
    grids.add_column("dims")
    grids.add_column("peak GiB", justify="right")
    on_host = any(entry.host for entry in fits)
    if on_host:
        grids.add_column("host GiB", justify="right")
    grids.add_column("options", overflow="fold")
    for entry in fits:
        host = [f"{entry.host / GIB:.2f}"] * on_host
        grids.add_row(dims_text(entry.options.dims), f"{entry.peak / GIB:.2f}", *host, savings_text(entry.options))
    yield grids
