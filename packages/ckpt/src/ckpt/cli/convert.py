"""`ckpt shard` (`reshard`) and `ckpt merge` (`convert`): convert between Hugging Face and sharded folders."""

from pathlib import Path
from typing import Annotated

import typer

import ckpt
from ckpt.cli import common
from ckpt.cli.common import Json, echo, print_json, progress_bar, reports_mistakes
from ckpt.layout.place import Grid

Source = Annotated[Path, typer.Argument(help="A Hugging Face folder, a sharded folder or a file of weights.")]
Destination = Annotated[
    Path,
    typer.Argument(
        help="The folder to write. An existing checkpoint is replaced; a folder with other files is refused."
    ),
]
Target = Annotated[
    str | None, typer.Option("--target", help="parallel, megatron or megatron_te (default: the source's).")
]


@reports_mistakes()
def shard(
    source: Source,
    destination: Destination,
    tp: common.Tp = 1,
    pp: common.Pp = 1,
    vpp: common.Vpp = 1,
    ep: common.Ep = 1,
    etp: common.Etp = None,
    target: Target = None,
    layers: common.Layers = None,
    vocab_multiple: common.VocabMultiple = 1,
    dtype: common.Dtype = None,
    json: Json = False,
) -> None:
    """Write one file for each rank of a grid, from a Hugging Face checkpoint or another grid's files."""
    grid = Grid(tp, pp, vpp, ep, etp)
    with progress_bar("writing") as progress:
        ckpt.reshard(
            source,
            destination,
            grid,
            target=target,  # type: ignore[arg-type]  # layout_for refuses an unknown one by name
            layers=common.read_layers(layers),
            vocab_multiple=vocab_multiple,
            dtype=common.read_dtype(dtype),
            progress=progress,
        )
    _report(destination, json)


@reports_mistakes()
def merge(
    source: Source,
    destination: Destination,
    dtype: common.Dtype = None,
    format: Annotated[
        str | None,
        typer.Option("--format", help="fp8: quantize the projections by blocks of 128 x 128 (default: plain weights)."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="The largest size of a file, such as 5GB.")
    ] = "5GB",
    copy_from: Annotated[
        Path | None,
        typer.Option("--copy-from", help="Copy tokenizer files from this folder (default: the source)."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The model of a LoRA adapter (default: the model that the adapter names)."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a Hugging Face checkpoint from a sharded or a Hugging Face checkpoint, in other files or another dtype.

    Torch's pickled weights (pytorch_model.bin or its shards) are a source, too, and are read without running code. A
    LoRA adapter of PEFT is merged into its base.
    """
    with progress_bar("merging") as progress:
        ckpt.merge(
            source,
            destination,
            dtype=common.read_dtype(dtype),
            format=format,  # type: ignore[arg-type]  # merge refuses an unknown one by name
            max_shard_size=max_shard_size,
            copy_from=copy_from,
            base=base,
            progress=progress,
        )
    _report(destination, json)
    if format == "fp8" and not json:
        from ckpt.files.block_fp8 import stacked_experts

        if kept := stacked_experts(ckpt.Checkpoint.open(destination).shapes):
            echo(f"stacked experts stay as they are, because vLLM reads no block scales for them: {', '.join(kept)}")


def _report(destination: Path, json: bool) -> None:
    files = sorted(destination.glob("*.safetensors"))
    facts = {"folder": str(destination), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
    if json:
        print_json(facts)
    else:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        echo(f"wrote {count}, {facts['bytes']:,} bytes, to {destination}")
