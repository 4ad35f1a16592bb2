"""`ckpt inspect`: what a checkpoint is, from its headers alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.options import Check
from ckpt.cli.output import Json, print_json, print_table, reports_mistakes, size_text

if TYPE_CHECKING:
    from ckpt.transfer.sources import Source


@reports_mistakes
def inspect(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder, a sharded one, or one file of weights with a config.json beside it."
        ),
    ],
    check: Check = False,
    json: Json = False,
) -> None:
    """Show a checkpoint's family, size, types and tensors; reads headers and checks them against the config."""
    from ckpt.transfer.sources import open_source

    facts = describe(open_source(folder, check=check))
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
        ("checksums", "none" if not facts["checksums"] else "recorded and right" if check else "recorded"),
    ]
    if facts["grid"] is not None:
        grid = " ".join(f"{axis}={size}" for axis, size in facts["grid"].items() if size is not None)
        rows += [("grid", grid), ("target", facts["target"])]
    print_table(str(folder), ("", ""), rows, header=False)


def describe(source: Source) -> dict[str, Any]:
    """Return the facts that `inspect` shows; parameters are counted once, whatever number of ranks hold them."""
    from ckpt.files.dtypes import NAMES
    from ckpt.files.header import read_header
    from ckpt.layout.pieces import volume

    layout = source.layout
    dtypes: dict[str, int] = {}
    for parts in source.pieces.values():
        for key, piece in parts:
            name = NAMES[source.tensors[key][1].dtype]
            dtypes[name] = dtypes.get(name, 0) + volume(piece.local_range)
    return {
        "family": layout.family.name,
        "role": layout.role,
        "target": layout.target,
        "grid": None if source.grid is None else dataclasses.asdict(source.grid),
        "parameters": sum(dtypes.values()),
        "bytes": sum(info.nbytes for _, info in source.tensors.values()),
        "dtypes": dtypes,
        "tensors": len(source.tensors),
        "files": len(source.files),
        "layers": layout.num_layers,
        "experts": layout.num_experts,
        "tied": layout.tied,
        "checksums": all(read_header(file).checksums for file in source.files),
    }
