"""The tables of `rl-models plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from rich.table import Table

from rl_models.plan import GIB, Memory, Planned, dims_text


def memory_tables(planned: Planned, limit: int | None, fits: Sequence[Planned]) -> Iterator[Table | str]:
    """What each model needs on a rank of each stage, the peak of all, and with a limit in bytes what fits.

    Args:
        planned: the grid that was asked for.
        limit: of a device; None: unknown.
        fits: the grids of the fewest ranks that fit the limit.
    """
    columns = [entry.name for entry in fields(Memory)]
    table = Table(title=f"GiB on a rank of {dims_text(planned.options.dims)}, {planned.options.tokens} tokens")
    table.add_column("model")
    table.add_column("stage", justify="right")
    for name in (*columns, "total"):
        table.add_column(name, justify="right", overflow="fold")  # a narrow terminal cuts no name off
    for model, stages in planned.models.items():
        for number, memory in enumerate(stages):
            cells = [getattr(memory, name) for name in columns]
            table.add_row(model, str(number), *(f"{cell / GIB:.2f}" for cell in (*cells, memory.total)))
    yield table
    how = "each on the host while another works" if planned.offload else "all on the same devices"
    yield f"peak: {planned.peak / GIB:.2f} GiB, {how}"
    if limit is None:
        return
    verdict = "fits" if planned.peak <= limit else "does not fit"
    yield f"{dims_text(planned.options.dims)} {verdict} {limit / GIB:.2f} GiB"
    if not fits:
        yield "no grid that was tried fits"
        return
    found = Table(title=f"The fewest ranks: {fits[0].options.dims.world_size}, on which this fits")
    found.add_column("dims")
    found.add_column("peak GiB", justify="right")
    for entry in fits:
        found.add_row(dims_text(entry.options.dims), f"{entry.peak / GIB:.2f}")
    yield found
