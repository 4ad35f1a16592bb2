"""`ckpt verify`, also named `ckpt diff`: say whether two checkpoints hold the same, and show the differences."""

from pathlib import Path
from typing import Annotated

import typer

import ckpt
from ckpt.cli.common import Json, echo, print_json, print_table, progress_bar, reports_mistakes, takes_urls


@reports_mistakes()
@takes_urls("a", "b")
def verify(
    a: Annotated[
        Path, typer.Argument(help="The reference: a Hugging Face folder, a sharded folder or a file of weights.")
    ],
    b: Annotated[Path, typer.Argument(help="The other checkpoint.")],
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="Relative tolerance.")] = 0.0,
    ignore_dtype: Annotated[
        bool, typer.Option("--ignore-dtype", help="Compare the values of tensors whose dtypes differ.")
    ] = False,
    most: Annotated[int, typer.Option("--most", min=1, help="The number of differences to show.")] = 20,
    json: Json = False,
) -> None:
    """Say whether two checkpoints are the same bit by bit, or within a tolerance; exit code 1 when they are not."""
    with progress_bar("comparing") as progress:
        report = ckpt.verify(a, b, atol=atol, rtol=rtol, dtypes=not ignore_dtype, progress=progress)
    if json:
        print_json(report.to_json())
    elif report.equal:
        verdict = f"within --rtol {rtol:g} and --atol {atol:g}" if rtol or atol else "the same"
        echo(f"{verdict}: {report.tensors:,} tensors, {report.elements:,} elements")
    else:
        # A tensor may differ in several ways. Tensors on one side alone, or of another shape, are not compared.
        names = {item.name for item in report.differences if item.kind != "config"}
        not_compared = {item.name for item in report.differences if item.kind in ("missing", "unexpected", "shape")}
        echo(f"{len(names):,} of {report.tensors + len(not_compared):,} tensors differ")
        if report.worst is not None and report.worst.elements:
            echo(f"worst: {report.worst.name}: {report.worst.detail}")
        rows = [(item.name, item.kind, item.detail) for item in report.differences[:most]]
        print_table(f"{len(report.differences)} differences", ("tensor", "kind", "detail"), rows)
    raise typer.Exit(0 if report.equal else 1)
