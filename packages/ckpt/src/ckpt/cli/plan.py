"""`ckpt plan`: show the bytes that each rank of a grid would hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

import ckpt
from ckpt.cli import common
from ckpt.cli.common import Json, print_json, print_table, reports_mistakes
from ckpt.layout.place import Grid, Place

if TYPE_CHECKING:
    import torch

    from ckpt.layout.model_layout import Layout

# The first pattern that matches a canonical name decides the tensor's component.
_COMPONENTS = (
    ("embedding", r"embed_tokens|\.embeddings\."),
    ("head", r"(^|\.)lm_head|^score"),
    ("norms", r"norm"),
    ("attention", r"self_attn\.|mixer\.[qkvo]_proj\."),
    ("linear attention", r"linear_attn\.|\.mamba\.|mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias)\b"),
    ("router", r"\.gate\.|\.router\."),
    ("experts", r"\.experts\.|block_sparse_moe\."),
    ("mlp", r"mlp\.|mixer\."),
)


@reports_mistakes()
def plan(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder, a sharded folder, a file of weights, or a folder with a config.json alone; "
            "a config.json does not tell the bytes of a vision tower; or its URL."
        ),
    ],
    tp: common.Tp = 1,
    pp: common.Pp = 1,
    vpp: common.Vpp = 1,
    ep: common.Ep = 1,
    etp: common.Etp = None,
    target: Annotated[
        str, typer.Option("--target", help="Names of the tensors: parallel, megatron or megatron_te.")
    ] = "parallel",
    layers: common.Layers = None,
    vocab_multiple: common.VocabMultiple = 1,
    dtype: common.Dtype = None,
    json: Json = False,
) -> None:
    """Show the bytes of each rank and component for a grid, padding and replicas included."""
    from ckpt.files.contents import INDEX, LAYOUT, SINGLE
    from ckpt.files.dtypes import config_dtype
    from ckpt.files.mirror import mirrored
    from ckpt.layout.config import is_weights, load_config
    from ckpt.transfer.sources import open_source

    grid = Grid(tp, pp, vpp, ep, etp)
    with mirrored(folder) as local:
        has_weights = is_weights(local) or any((local / name).is_file() for name in (SINGLE, INDEX, LAYOUT))
        source = open_source(local) if has_weights else None
        layout = ckpt.layout_for(load_config(local)) if source is None else source.layout
    predicting = layout.predictions if source is None else layout.prediction_layers
    layout = dataclasses.replace(
        layout,
        prediction_layers=predicting if layout.may_predict and target == "parallel" else 0,
        target=target,  # type: ignore[arg-type]  # the layout refuses an unknown one by name
        layers=common.read_layers(layers),
        vocab_multiple=vocab_multiple,
    )
    chosen = common.read_dtype(dtype)
    known: dict[str, torch.dtype] = {}
    if source is not None and chosen is None:
        known = {name: source.stored_dtype(name) for name in source.pieces}
    other = chosen or config_dtype(layout.text)
    shares = [(place, _components(layout, place, known, other)) for place in grid.places()]
    if json:
        print_json(
            [
                {"place": place.to_json(), "bytes": sum(components.values()), "components": components}
                for place, components in shares
            ]
        )
        return
    used = [name for name in shares[0][1] if any(components[name] for _, components in shares)]
    rows = [
        (str(place), *(decimal(components[name]) for name in used), decimal(sum(components.values())))
        for place, components in shares
    ]
    uncounted = ", without its vision tower" if layout.family.carried and source is None else ""
    print_table(f"{folder} on {layout.target}{uncounted}", ("place", *used, "total"), rows)


def _components(layout: Layout, place: Place, known: Mapping[str, torch.dtype], other: torch.dtype) -> dict[str, int]:
    """Return the bytes of each component at a place, padding and replicas included.

    `known` has dtypes by canonical name; all other tensors are of the dtype `other`.
    """
    components = {label: 0 for label in (*(label for label, _ in _COMPONENTS), "vision", "mtp")}
    for local, block in layout.at(place).items():
        name = block.names[0]
        # A model shares its embedding and head with the multi-token-prediction layers.
        if not layout.is_optional(block) and layout.canonical[name].copy_of is None:
            labels = (label for label, pattern in _COMPONENTS if re.search(pattern, name))
            component = "vision" if layout.is_carried(block) else next(labels, "other")
            label = "mtp" if local.startswith("mtp.") else component
            components[label] = components.get(label, 0) + block.numel * known.get(name, other).itemsize
    return components
