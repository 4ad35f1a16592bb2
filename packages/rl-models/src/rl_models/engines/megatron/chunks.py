"""A rank's chunks of a Megatron-Core model, in the terms of ckpt."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

import ckpt
from megatron_utils import MegatronGrid
from megatron_utils.gpt import PackedGPTModel


class ChunkedLayout(ckpt.Layout):
    """A layout with the chunk in its local names: `chunk1.decoder.layers.0...`.

    Megatron-Core counts layers inside each chunk, so names repeat between the chunks of a rank; a training checkpoint
    needs one name per tensor.
    """

    @classmethod
    def of(cls, layout: ckpt.Layout) -> ChunkedLayout:
        """Return the same layout with such names."""
        return cls(**{field.name: getattr(layout, field.name) for field in fields(layout) if field.init})

    def at(self, place: ckpt.Place) -> dict[str, ckpt.Block]:
        """Return the local tensors of `place`."""
        return {local_name(name, place): block for name, block in super().at(place).items()}


def local_name(name: str, place: ckpt.Place) -> str:
    """Return the name of a chunk's tensor among all tensors of a rank."""
    chunk, chunks = place.vpp
    return name if chunks == 1 else f"chunk{chunk}.{name}"


def places_of(megatron: MegatronGrid, virtual_stages: int) -> list[ckpt.Place]:
    """Return the place of each chunk of this rank."""
    groups = megatron.groups
    axes = {"tp": groups.tp, "pp": groups.pp, "ep": groups.ep, "etp": groups.expt_tp}
    place = {axis: (group.rank(), group.size()) for axis, group in axes.items()}
    return [ckpt.Place(**place, vpp=(number, virtual_stages)) for number in range(virtual_stages)]


def stored_tensors(chunk: PackedGPTModel, place: ckpt.Place) -> dict[str, Tensor]:
    """Return the tensors of a chunk that a checkpoint holds: parameters and the routers' biases."""
    biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
    return {local_name(name, place): x for name, x in {**dict(chunk.named_parameters()), **biases}.items()}
