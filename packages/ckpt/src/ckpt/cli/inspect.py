"""`ckpt inspect`: show what a checkpoint is, from its headers alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from ckpt.cli.options import Check
from ckpt.cli.output import Json, print_json, print_table, reports_mistakes

if TYPE_CHECKING:
    import torch

    from ckpt.files.header import Header
    from ckpt.layout.model_layout import Layout
    from ckpt.transfer.sources import Source


@reports_mistakes
def inspect(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder, a sharded one, a training run's (the latest step) or one of its steps, or one "
            "file of weights with a config.json beside it."
        ),
    ],
    check: Check = False,
    json: Json = False,
) -> None:
    """Show a checkpoint's family, size, types and tensors; reads headers and checks them against the config."""
    from ckpt.files.contents import STATE
    from ckpt.training.runs import LATEST
    from ckpt.transfer.sources import open_source

    if (folder / STATE).is_file() or (folder / LATEST).is_file():
        facts = describe_training(folder, check)
    else:
        facts = describe(open_source(folder, check=check))
    if json:
        print_json(facts)
        return
    dtypes = ", ".join(f"{name} {count:,}" for name, count in facts["dtypes"].items())
    rows = [
        ("family", facts["family"]),
        ("role", facts["role"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("bytes", f"{facts['bytes']:,} ({decimal(facts['bytes'])})"),
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
    if "step" in facts:
        rows += [("step", f"{facts['step']:,}"), ("optimizer", ", ".join(facts["optimizer"]) or "none")]
    print_table(str(folder), ("", ""), rows)


def describe(source: Source) -> dict[str, Any]:
    """Return the facts that `inspect` shows; a parameter that several ranks hold is counted once."""
    from ckpt.files.header import read_header
    from ckpt.layout.pieces import volume

    dtypes: Counter[torch.dtype] = Counter()
    for parts in source.pieces.values():
        for key, piece in parts:
            dtypes[source.tensors[key][1].dtype] += volume(piece.local_range)
    nbytes = sum(info.nbytes for _, info in source.tensors.values())
    facts = _facts(source.layout, dtypes, nbytes, len(source.tensors), [read_header(file) for file in source.files])
    grid = None if source.grid is None else dataclasses.asdict(source.grid)
    return {**facts, "target": source.layout.target, "grid": grid}


def describe_training(folder: Path, check: bool) -> dict[str, Any]:
    """Return the facts that `inspect` shows of a training checkpoint, or of a run's latest one.

    `bytes` counts the optimizer state, too; `parameters`, `dtypes` and `tensors` count the weights alone. With `check`,
    the bytes of all files are compared with their recorded checksums.
    """
    from ckpt.files.contents import STATE
    from ckpt.files.disk import while_unchanged
    from ckpt.files.tensor_bytes import check_bytes
    from ckpt.training.boxes import check_headers, read_metadata
    from ckpt.training.checkpoint import open_step
    from ckpt.training.runs import step_of

    is_step = (folder / STATE).is_file()
    step = step_of(folder.resolve().name) if is_step else None
    opened, state, files = open_step(folder.resolve().parent if is_step else folder, step)
    with while_unchanged(files):
        metadata = read_metadata(opened)
        headers = check_headers(opened, metadata, 0, 1)
        if check:
            check_bytes(headers)
    stored = {name: (entry.dtype, entry.shape) for name, entry in metadata.items()}
    weights = {name.removeprefix("model/"): kind for name, kind in stored.items() if name.startswith("model/")}
    dtypes: Counter[torch.dtype] = Counter()
    for dtype, shape in weights.values():
        dtypes[dtype] += math.prod(shape)
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in stored.values())
    facts = _facts(_layout_of(opened, weights.keys()), dtypes, nbytes, len(weights), headers.values())
    slots = sorted({name.split("/")[1] for name in stored if name.startswith("optimizer/")})
    return {**facts, "target": None, "grid": None, "step": state["step"], "optimizer": slots}


def _facts(
    layout: Layout, dtypes: Mapping[torch.dtype, int], nbytes: int, tensors: int, headers: Collection[Header]
) -> dict[str, Any]:
    from ckpt.files.dtypes import NAMES

    return {
        "family": layout.family.name,
        "role": layout.role,
        "parameters": sum(dtypes.values()),
        "bytes": nbytes,
        "dtypes": {NAMES[dtype]: count for dtype, count in dtypes.items()},
        "tensors": tensors,
        "files": len(headers),
        "layers": layout.num_layers,
        "experts": layout.num_experts,
        "tied": layout.tied,
        "checksums": all(header.checksums for header in headers),
    }


def _layout_of(folder: Path, weights: Set[str]) -> Layout:
    """Return the layout of a training checkpoint's model, in the role whose tensors the checkpoint holds."""
    from ckpt.layout.config import load_config
    from ckpt.layout.families import ROLES
    from ckpt.layout.model_layout import layout_for

    config = load_config(folder)
    for role in ROLES:
        layout = layout_for(config, role=role)
        language_model = {name for name in weights if not name.startswith(layout.family.carried or "\0")}
        required = {name for name, canonical in layout.canonical.items() if not canonical.optional}
        if required <= language_model <= layout.canonical.keys():
            return layout
    raise ValueError(f"{folder} does not hold the weights that its config.json describes; restore it from a copy")
