"""`Canonical`: a tensor of a Hugging Face model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckpt.layout.pieces import Shape, exchanged


@dataclass(frozen=True)
class Canonical:
    """A canonical tensor: its full shape, and how files may hold the tensor.

    Attributes:
        shape: The full shape.
        optional: Whether a file and a rank may lack the tensor.
        aliases: Other names in files.
        transposable: Whether files may hold the tensor with its last two dimensions exchanged.
        keep_dtype: Whether loads ignore `dtype` and keep the stored dtype.
        copy_of: The canonical tensor that a model shares for this tensor; None: the model shares none.
        carried: Whether the tensor is copied whole, without a known structure.
    """

    shape: Shape
    optional: bool = False
    aliases: tuple[str, ...] = ()
    transposable: bool = False
    keep_dtype: bool = False
    copy_of: str | None = None
    carried: bool = False


def other_order(canonical: Mapping[str, Canonical], stored: Mapping[str, Shape]) -> Literal["", "free", "kept"]:
    """Return whether files hold the transposable matrices with the last two dimensions exchanged, given all shapes.

    All such matrices of a checkpoint have the same order, which the non-square matrices show. Readers that look at
    each matrix by itself, as transformers does, always take a square matrix for the other order.

    Returns:
        "" for the canonical order; "free" where the shapes show the other order; "kept" where a matrix is square, so
        that a save must keep the other order.
    """
    pairs = [(entry.shape, stored[name]) for name, entry in canonical.items() if entry.transposable and name in stored]
    if all(shape == other for shape, other in pairs) or any(exchanged(other) != shape for shape, other in pairs):
        return ""
    return "kept" if any(shape == other for shape, other in pairs) else "free"
