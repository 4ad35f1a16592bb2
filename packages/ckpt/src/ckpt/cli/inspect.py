"""`ckpt inspect`: describe a checkpoint from its headers alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from ckpt.cli.common import Json, print_json, print_table, reports_mistakes

if TYPE_CHECKING:
    import torch

    from ckpt.layout.model_layout import Layout
    from ckpt.transfer.tensor_files import TensorFiles


@reports_mistakes()
def inspect(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder, a sharded folder, the folder of a training run (its latest step) or of a "
            "step, an adapter of PEFT, or a file of weights with a config.json beside it; or its URL, s3://..."
        ),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Compare all bytes with the recorded checksums (default: headers alone).")
    ] = False,
    json: Json = False,
) -> None:
    """Show a checkpoint's family, size, types and tensors; reads headers and checks them against the config."""
    from ckpt.files.contents import is_adapter
    from ckpt.files.mirror import mirrored
    from ckpt.training.saved_step import is_training
    from ckpt.transfer.sources import open_source

    with mirrored(folder) as local:
        if is_adapter(local):
            _show_adapter(local, str(folder), check, json)
            return
        if is_training(local):
            facts = _describe_training(local, check)
        else:
            source = open_source(local)
            if check:
                source.check()
            sizes = None if source.grid is None else dataclasses.asdict(source.grid)
            facts = {**_describe(source, source.layout), "target": source.layout.target, "grid": sizes}
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
    if facts["quantization"] is not None:
        rows.append(("stored as", facts["quantization"]))
    if facts["grid"] is not None:
        grid = " ".join(f"{axis}={size}" for axis, size in facts["grid"].items() if size is not None)
        rows += [("grid", grid), ("target", facts["target"])]
    if "step" in facts:
        rows += [("step", f"{facts['step']:,}"), ("optimizer", ", ".join(facts["optimizer"]) or "none")]
    print_table(str(folder), ("", ""), rows)


def _show_adapter(folder: Path, title: str, check: bool, json: bool) -> None:
    """Show an adapter of PEFT: its model, the adapted layers, and the size."""
    from ckpt.files.dtypes import NAMES
    from ckpt.transfer.adapters import adapter_source

    source = adapter_source(folder)
    if check:
        source.check()
    config, infos = source.layout.config, [info for _, info in source.tensors.values()]
    read = ("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules", "target_parameters")
    facts = {
        "kind": "LoRA adapter",
        **{name: config.get(name) for name in (*read, "modules_to_save")},
        "parameters": sum(math.prod(info.shape) for info in infos),
        "bytes": sum(info.nbytes for info in infos),
        "dtypes": sorted({NAMES[info.dtype] for info in infos}),
        "tensors": len(infos),
    }
    if json:
        print_json(facts)
        return
    shown = {name: value for name, value in facts.items() if value not in (None, [], False)}
    rows = [(name, ", ".join(value) if isinstance(value, list) else str(value)) for name, value in shown.items()]
    print_table(title, ("", ""), rows)


def _describe(files: TensorFiles, layout: Layout, prefix: str = "") -> dict[str, Any]:
    """Return the facts that `inspect` shows of files, whose weights have names with this prefix.

    `bytes` counts every byte of the files. Other fields describe weights only, and count a parameter that several
    ranks hold once.
    """
    from ckpt.files.dtypes import NAMES
    from ckpt.files.quantized import Quantized
    from ckpt.layout.pieces import volume

    weights = {name: parts for name, parts in files.pieces.items() if name.startswith(prefix)}
    dtypes: Counter[torch.dtype] = Counter()
    for parts in weights.values():
        for key, piece in parts:
            dtypes[files.tensors[key][1].dtype] += volume(piece.local_range)
    return {
        "family": layout.family.name,
        "role": layout.role,
        "parameters": sum(dtypes.values()),
        "bytes": sum(info.nbytes for header in files.headers.values() for info in header.tensors.values()),
        "dtypes": {NAMES[dtype]: count for dtype, count in dtypes.items()},
        "tensors": len(weights),
        "files": len(files.headers),
        "layers": layout.num_layers,
        "experts": layout.num_experts,
        "tied": layout.tied,
        "quantization": next((info.method for _, info in files.tensors.values() if isinstance(info, Quantized)), None),
        "checksums": all(header.checksums for header in files.headers.values()),
    }


def _describe_training(folder: Path, check: bool) -> dict[str, Any]:
    """Return the facts that `inspect` shows of a training checkpoint, or of a run's latest checkpoint."""
    from ckpt.files.disk import while_unchanged
    from ckpt.training.saved_step import open_training

    opened = open_training(folder)
    with while_unchanged(opened.modified):
        if check:
            opened.files.check()
    facts = _describe(opened.files, opened.layout, "model/")
    return {**facts, "target": None, "grid": None, "step": opened.state["step"], "optimizer": opened.slots}
