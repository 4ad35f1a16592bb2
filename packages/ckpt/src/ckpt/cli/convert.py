"""`ckpt shard` (`reshard`) and `ckpt merge` (`convert`): between Hugging Face, sharded and Megatron-Core folders."""

from pathlib import Path
from typing import Annotated, Any

import typer

import ckpt
import ckpt.training
from ckpt.cli import common
from ckpt.cli.common import Json, echo, print_json, progress_bar, reports_mistakes, takes_urls
from ckpt.layout.place import Grid

Source = Annotated[
    Path, typer.Argument(help="A Hugging Face folder, a sharded folder or a file of weights, or its URL.")
]
Destination = Annotated[
    Path,
    typer.Argument(
        help="The folder to write. An existing checkpoint is replaced; a folder with other files is refused."
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", help="Names of the tensors: parallel, megatron or megatron_te (default: the source's)."),
]


@reports_mistakes()
@takes_urls("source")
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
@takes_urls("source", "copy_from", "base")
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
        typer.Option(
            "--copy-from",
            help="Copy tokenizer files, and read a missing config.json, from this folder (default: the source).",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The model of a LoRA adapter (default: the model that the adapter names)."),
    ] = None,
    to: Annotated[str, typer.Option("--to", help="The kind of checkpoint to write: hf, megatron or training.")] = "hf",
    dims: Annotated[
        str | None,
        typer.Option("--dims", help="With --to megatron: the grid that divides the files, such as tp=2,pp=2,ep=4."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="With --to megatron: megatron_te (default) or megatron (local spec)."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a Hugging Face checkpoint, or a checkpoint of Megatron-Core, from a checkpoint of any kind.

    A source is a Hugging Face folder, a sharded folder, a run or a step of Megatron-Core (torch_dist), a LoRA adapter
    of PEFT, which is merged into its base, or torch's pickled weights. Pickles are read without running code. With
    --to megatron a training run (save_training) keeps its optimizer state, and --to training goes back; with --to hf
    its weights alone are written.
    """
    from ckpt.training.runs import folder_name
    from ckpt.training.saved_step import is_training

    of_run = is_training(source)
    options = {"--dims": dims, "--target": target, "--dtype": dtype, "--format": format, "--base": base}
    options |= {"--copy-from": copy_from}
    taken = {
        "hf": {"--dtype", "--copy-from"} if of_run else {"--dtype", "--format", "--base", "--copy-from"},
        "megatron": {"--dims", "--target"} if of_run else {"--dims", "--target", "--dtype"},
        "training": {"--copy-from"},
    }
    if to not in taken:
        raise ValueError(f"--to={to} is unknown; use hf, megatron or training")
    if wrong := [name for name, value in options.items() if value is not None and name not in taken[to]]:
        raise ValueError(f"--to {to} takes no {' or '.join(wrong)} with this source; leave it out")
    places: dict[str, Any] = {"grid": _read_dims(dims), "target": target or "megatron_te"}
    with progress_bar("converting") as progress:
        if to == "training":
            ckpt.training.megatron_to_training(source, destination, copy_from=copy_from, progress=progress)
            step = ckpt.training.latest_step(destination)
            assert step is not None
            destination /= folder_name(step)  # the run may hold other steps
        elif of_run and to == "hf":
            ckpt.training.training_to_hf(
                source,
                destination,
                dtype=common.read_dtype(dtype),
                max_shard_size=max_shard_size,
                copy_from=copy_from,
                progress=progress,
            )
        elif of_run:
            ckpt.training.training_to_megatron(source, destination, **places, progress=progress)
        elif to == "megatron":
            ckpt.to_megatron(source, destination, **places, dtype=common.read_dtype(dtype), progress=progress)
        else:
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


def _read_dims(text: str | None) -> Grid:
    """Return the grid that `--dims` names."""
    sizes: dict[str, int] = {}
    for entry in filter(None, (text or "").split(",")):
        axis, _, size = entry.partition("=")
        if axis not in ("tp", "pp", "vpp", "ep", "etp") or not size.isdecimal() or axis in sizes:
            raise ValueError(f"--dims={text} must be sizes of tp, pp, vpp, ep or etp, such as tp=2,pp=2")
        sizes[axis] = int(size)
    return Grid(**sizes)


def _report(destination: Path, json: bool) -> None:
    files = sorted(file for kind in ("safetensors", "distcp") for file in destination.rglob(f"*.{kind}"))
    facts = {"folder": str(destination), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
    if json:
        print_json(facts)
    else:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        echo(f"wrote {count}, {facts['bytes']:,} bytes, to {destination}")
