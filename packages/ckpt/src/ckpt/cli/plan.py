"""`ckpt plan`: show the bytes that each rank of a grid would hold."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

import ckpt
from ckpt.cli import options
from ckpt.cli.output import Json, print_json, print_table, reports_mistakes
from ckpt.layout.place import Grid


@reports_mistakes
def plan(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder, a sharded one, a file of weights, or a folder with a config.json alone, which "
            "does not tell the bytes of a vision tower."
        ),
    ],
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    vpp: options.Vpp = 1,
    ep: options.Ep = 1,
    etp: options.Etp = None,
    target: options.Target = "parallel",
    layers: options.Layers = None,
    vocab_multiple: options.VocabMultiple = 1,
    dtype: options.Dtype = None,
    json: Json = False,
) -> None:
    """Show the bytes of each rank and component for a grid, padding and replicas included."""
    from ckpt.files.contents import INDEX, LAYOUT, SINGLE
    from ckpt.layout.config import is_weights, load_config
    from ckpt.transfer.memory_plan import config_dtype, plan_bytes, stored_dtypes
    from ckpt.transfer.sources import open_source

    grid = Grid(tp, pp, vpp, ep, etp)
    has_weights = is_weights(folder) or any((folder / name).is_file() for name in (SINGLE, INDEX, LAYOUT))
    source = open_source(folder) if has_weights else None
    layout = dataclasses.replace(
        ckpt.layout_for(load_config(folder)) if source is None else source.layout,
        target=target,  # type: ignore[arg-type]  # the layout refuses an unknown one by name
        layers=options.read_layers(layers),
        vocab_multiple=vocab_multiple,
    )
    chosen = options.read_dtype(dtype)
    known = {} if source is None or chosen is not None else stored_dtypes(source)
    shares = plan_bytes(layout, grid, chosen or config_dtype(layout.text), known)
    if json:
        print_json(
            [{"place": share.place.to_json(), "bytes": share.total, "components": share.components} for share in shares]
        )
        return
    used = [name for name in shares[0].components if any(share.components[name] for share in shares)]
    rows = [
        (str(share.place), *(decimal(share.components[name]) for name in used), decimal(share.total))
        for share in shares
    ]
    uncounted = ", without its vision tower" if layout.family.carried and source is None else ""
    print_table(f"{folder} on {layout.target}{uncounted}", ("place", *used, "total"), rows)
