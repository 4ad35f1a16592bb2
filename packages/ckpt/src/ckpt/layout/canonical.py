"""`Canonical`: a tensor of a Hugging Face model."""

from dataclasses import dataclass

from ckpt.layout.pieces import Shape


@dataclass(frozen=True)
class Canonical:
    """A canonical tensor: its full shape, and how files may hold the tensor.

    Attributes:
        shape: The full shape.
        optional: Whether a file and a rank may lack the tensor.
        aliases: Other names in files.
        transposable: Whether files may hold the tensor with its last two dimensions exchanged.
        keep_dtype: Whether loads ignore `dtype` and keep the stored dtype.
        copy_of: The canonical tensor that a model shares for this one; None: the tensor is its own.
        carried: Whether the tensor is copied whole, without a known structure.
    """

    shape: Shape
    optional: bool = False
    aliases: tuple[str, ...] = ()
    transposable: bool = False
    keep_dtype: bool = False
    copy_of: str | None = None
    carried: bool = False
