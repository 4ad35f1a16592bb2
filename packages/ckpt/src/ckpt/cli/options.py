"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.layout.place import LayerPlacement

if TYPE_CHECKING:
    import torch

Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel size.")]
Vpp = Annotated[int, typer.Option("--vpp", min=1, help="Virtual pipeline stages of each rank.")]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Expert parallel size.")]
Etp = Annotated[int | None, typer.Option("--etp", min=1, help="Tensor parallel size of each expert (default: --tp).")]
Target = Annotated[str, typer.Option("--target", help="parallel, megatron or megatron_te.")]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="'balanced', or the layers of each stage, such as 7,8,8,7 (default: equal)."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Cast weights to this dtype, such as bfloat16 (default: as stored).")
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Compare all bytes with the recorded checksums first; reads every file once more (default: off).",
    ),
]
VocabMultiple = Annotated[
    int, typer.Option("--vocab-multiple", min=1, help="Pad each rank's vocabulary rows to a multiple of this.")
]


def read_layers(text: str | None) -> LayerPlacement:
    """Return the layer placement that `--layers` names."""
    if text is None or text == "balanced":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers={text!r} must be 'balanced' or numbers such as 7,8,8,7") from None


def read_dtype(text: str | None) -> torch.dtype | None:
    """Return the floating-point dtype that `--dtype` names."""
    if text is None:
        return None
    from ckpt.files.dtypes import dtype_of_name

    dtype = dtype_of_name(text)
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"--dtype={text!r} is no type of weights; use one such as bfloat16 or float32")
    return dtype
