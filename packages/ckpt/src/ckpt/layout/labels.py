"""The number of labels of a value head: numbers for each token, such as values, rewards or classes."""

from collections.abc import Mapping

from ckpt.files.folder import Checkpoint
from ckpt.layout.families.rows import VALUE_HEADS
from ckpt.layout.pieces import Shape


def stored_labels(shapes: Mapping[str, Shape]) -> int | None:
    """Return the number of rows of the value head among the tensors of a checkpoint; None without such a head."""
    return next((shapes[name][0] for name in VALUE_HEADS if len(shapes.get(name, ())) == 2), None)


def labels_of(checkpoint: Checkpoint, num_labels: int | None) -> int:
    """Return the labels of a checkpoint's value head, or `num_labels` (None: 1) of a new one.

    Raises:
        ValueError: The checkpoint has another number of labels than `num_labels`.
    """
    stored = stored_labels(checkpoint.shapes)
    if num_labels is not None and stored not in (None, num_labels):
        raise ValueError(
            f"num_labels={num_labels}, and the value head of {checkpoint.path} has {stored} labels; leave num_labels "
            "out"
        )
    return stored or num_labels or 1
