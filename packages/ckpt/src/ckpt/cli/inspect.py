"""`ckpt inspect`: what a checkpoint is, from its headers alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

import ckpt
from ckpt.cli.output import Json, print_json, print_table, reports_mistakes, size_text


@reports_mistakes
def inspect(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder, or one file of weights with a config.json beside it.")
    ],
    json: Json = False,
) -> None:
    """Show a checkpoint's family, size, types and tensors; reads headers and checks them against the config."""
    from ckpt.transfer.sources import open_source

    checkpoint = ckpt.open_checkpoint(folder)
    facts = describe(checkpoint, open_source(folder).layout)
    if json:
        print_json(facts)
        return
    dtypes = ", ".join(f"{name} {count:,}" for name, count in facts["dtypes"].items())
    rows = [
        ("family", facts["family"]),
        ("role", facts["role"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("bytes", f"{facts['bytes']:,} ({size_text(facts['bytes'])})"),
        ("types (elements)", dtypes),
        ("tensors", f"{facts['tensors']:,}"),
        ("files", f"{facts['files']:,}"),
        ("layers", f"{facts['layers']:,}"),
        ("experts", f"{facts['experts']:,}"),
        ("tied embeddings", "yes" if facts["tied"] else "no"),
    ]
    print_table(str(folder), ("", ""), rows, header=False)


def describe(checkpoint: ckpt.Checkpoint, layout: ckpt.Layout) -> dict[str, Any]:
    """The facts that `inspect` shows."""
    from ckpt.files.dtypes import NAMES

    dtypes: dict[str, int] = {}
    for _, info in checkpoint.tensors.values():
        dtypes[NAMES[info.dtype]] = dtypes.get(NAMES[info.dtype], 0) + math.prod(info.shape)
    return {
        "family": layout.family.name,
        "role": layout.role,
        "parameters": sum(dtypes.values()),
        "bytes": sum(info.nbytes for _, info in checkpoint.tensors.values()),
        "dtypes": dtypes,
        "tensors": len(checkpoint.tensors),
        "files": len(checkpoint.headers),
        "layers": layout.num_layers,
        "experts": layout.num_experts,
        "tied": layout.tied,
    }
