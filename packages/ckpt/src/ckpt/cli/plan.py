"""`ckpt plan`: what each rank of a grid would hold."""

from pathlib import Path
from typing import Annotated

import typer

import ckpt
from ckpt.cli.options import (
    Dtype,
    Ep,
    Etp,
    Layers,
    Pp,
    Target,
    Tp,
    VocabMultiple,
    Vpp,
    read_dtype,
    read_grid,
    read_layers,
)
from ckpt.cli.output import Json, print_json, print_table, reports_mistakes, size_text


@reports_mistakes
def plan(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder, or a folder with a config.json alone.")],
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    target: Target = "parallel",
    layers: Layers = None,
    vocab_multiple: VocabMultiple = 1,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show the bytes of each rank and component for a grid, padding and replicas included."""
    from ckpt.folder import INDEX, SINGLE
    from ckpt.match import detect_role
    from ckpt.plan import config_dtype, plan_bytes, stored_dtypes

    grid = read_grid(tp, pp, vpp, ep, etp)
    has_weights = any((folder / name).is_file() for name in (SINGLE, INDEX))
    checkpoint = ckpt.open_checkpoint(folder) if has_weights else None
    layout = ckpt.layout_for(
        folder,
        target,  # type: ignore[arg-type]  # layout_for refuses an unknown one by name
        "causal_lm" if checkpoint is None else detect_role(checkpoint),
        layers=read_layers(layers),
        vocab_multiple=vocab_multiple,
    )
    chosen = read_dtype(dtype)
    known = {} if checkpoint is None or chosen is not None else stored_dtypes(checkpoint, layout)
    shares = plan_bytes(layout, grid, chosen or config_dtype(layout.text), known)
    if json:
        print_json(
            [{"place": share.place.to_json(), "bytes": share.total, "components": share.components} for share in shares]
        )
        return
    used = [name for name in shares[0].components if any(share.components[name] for share in shares)]
    rows = [
        (str(share.place), *(size_text(share.components[name]) for name in used), size_text(share.total))
        for share in shares
    ]
    print_table(f"{folder} on {layout.target}", ("place", *used, "total"), rows)
