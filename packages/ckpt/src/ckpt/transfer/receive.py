"""Fill a live model with the full tensors of a stream, as `stream_hf` yields them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ckpt.files.boxio import view_of
from ckpt.layout.dtensors import on_this_rank
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Box, extents
from ckpt.layout.place import Place


@torch.no_grad()
def receive_hf(
    named_tensors: Iterable[tuple[str, Tensor]], layout: Layout, chunks: Sequence[tuple[Place, Mapping[str, Tensor]]]
) -> None:
    """Copy the rank's part of each tensor into the model in place, in its dtype; one full tensor is held at a time.

    Args:
        named_tensors: (Hugging Face name, full tensor); every tensor of the layout once. Optional tensors and
            multi-token-prediction layers may be left out, and then stay.
        layout: From `layout_for`.
        chunks: The place of each of this rank's chunks, and its tensors by local name; DTensors under FSDP2.

    Raises:
        ValueError: A name is not of the layout or comes twice, a shape is wrong, or at the end a tensor is missing; the
            model then has parts of both weights.
    """
    parts: dict[str, list[tuple[Tensor, Box, Box]]] = {}
    for place, tensors in chunks:
        blocks = layout.at(place)
        for name, tensor in tensors.items():
            local, box = on_this_rank(name, tensor, blocks[name].shape)
            for piece in blocks[name].part(box).pieces:
                if piece.canonical_range is not None:
                    found = parts.setdefault(piece.name, [])
                    found.append((local, piece.local_range, piece.canonical_range))
    needed = required_names(layout)
    seen: set[str] = set()
    for name, whole in named_tensors:
        entry = layout.canonical.get(name)
        if entry is None or name in seen or tuple(whole.shape) != tuple(entry.shape):
            problem = "is not a tensor of the model" if entry is None else f"has the shape {list(whole.shape)}"
            problem = "came twice" if name in seen else problem
            raise ValueError(f"{name} {problem}; send each tensor of the model once, whole, under its name in files")
        seen.add(name)
        for local, local_range, canonical_range in parts.get(name, ()):
            values = view_of(whole, canonical_range).reshape(extents(local_range))
            view_of(local, local_range).copy_(values)
    if left := sorted(needed - seen):
        raise ValueError(f"the stream ended without {', '.join(left[:3])} ({len(left)} tensors in all)")


def required_names(layout: Layout) -> frozenset[str]:
    """Return the canonical tensors without which a model is not complete."""
    # A layout keeps its canonical tensors for the next call; a replaced one makes them anew.
    canonical = (replace(layout, prediction_layers=0) if layout.prediction_layers else layout).canonical
    return frozenset(name for name, entry in canonical.items() if not entry.optional and entry.copy_of is None)
