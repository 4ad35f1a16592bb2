"""`ckpt verify` and `ckpt diff`: say whether two checkpoints hold the same tensors, and show the differences."""

from pathlib import Path
from typing import Annotated

import typer

import ckpt
from ckpt.cli.output import Json, print_json, print_table, progress_bar, reports_mistakes
from ckpt.comparison.report import Report

A = Annotated[Path, typer.Argument(help="The reference: a Hugging Face folder, a sharded one or a file of weights.")]
B = Annotated[Path, typer.Argument(help="The other checkpoint.")]
Atol = Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance.")]
Rtol = Annotated[float, typer.Option("--rtol", min=0, help="Relative tolerance.")]
IgnoreDtype = Annotated[bool, typer.Option("--ignore-dtype", help="Compare the values of tensors whose dtypes differ.")]


@reports_mistakes
def verify(
    a: A, b: B, atol: Atol = 0.0, rtol: Rtol = 0.0, ignore_dtype: IgnoreDtype = False, json: Json = False
) -> None:
    """Say whether two checkpoints are the same, bit by bit or within a tolerance; exit code 1 when they are not."""
    _compare(a, b, atol, rtol, ignore_dtype, json, most=0)


@reports_mistakes
def diff(
    a: A,
    b: B,
    atol: Atol = 0.0,
    rtol: Rtol = 0.0,
    ignore_dtype: IgnoreDtype = False,
    most: Annotated[int, typer.Option("--most", min=1, help="The number of rows to show.")] = 50,
    json: Json = False,
) -> None:
    """Show a table of all tensors that differ; exit code 1 when there are any."""
    _compare(a, b, atol, rtol, ignore_dtype, json, most)


def _compare(a: Path, b: Path, atol: float, rtol: float, ignore_dtype: bool, json: bool, most: int) -> None:
    """Compare and print a table of at most `most` differences; 0 prints a summary."""
    with progress_bar("comparing") as progress:
        report = ckpt.verify(a, b, atol=atol, rtol=rtol, dtypes=not ignore_dtype, progress=progress)
    if json:
        print_json(report.to_json())
    elif report.equal:
        typer.echo(f"the same: {report.tensors:,} tensors, {report.elements:,} elements")
    elif most:
        rows = [(item.name, item.kind, item.detail) for item in report.differences[:most]]
        print_table(f"{len(report.differences)} differences", ("tensor", "kind", "detail"), rows)
    else:
        _summary(report)
    raise typer.Exit(0 if report.equal else 1)


def _summary(report: Report) -> None:
    # A tensor may differ in several ways. Tensors on one side alone, or of another shape, are not compared.
    tensors = Report(differences=[item for item in report.differences if item.kind != "config"])
    names = {item.name for item in tensors.differences}
    not_compared = {item.name for item in tensors.differences if item.kind in ("missing", "unexpected", "shape")}
    typer.echo(f"{len(names):,} of {report.tensors + len(not_compared):,} tensors differ")
    for item in report.differences:
        if item.kind == "config":
            typer.echo(f"{item.name}: {item.detail}")
    for label, found in (("first", tensors.first), ("worst", tensors.worst)):
        if found is not None:
            typer.echo(f"{label}: {found.name}: {found.kind}: {found.detail}")
