"""Low-rank adapters on Megatron-Core's linears: the native backend's tensors, initial weights and files."""

from __future__ import annotations

from collections.abc import Sequence

import ckpt
from ckpt.layout import adaptable
from megatron_utils.gpt import PackedGPTModel, Part, add_lora_
from parallel_models.engine import Lora, describe, require_linears
from rl_models.backends.megatron.engine import local_name


def add(
    chunks: Sequence[PackedGPTModel], lora: Lora, layout: ckpt.Layout, places: Sequence[ckpt.Place], path: str
) -> ckpt.AdapterLayout:
    """Freeze the chunks of a model, and give the chosen linears adapters; a value head is trained with them.

    Raises:
        ValueError: A target matches nothing, or is the embedding, the head or an expert.
    """
    native = ckpt.layout_for(path, target="parallel", role=layout.role)
    options, found = describe(lora, native, path)
    require_linears("megatron", found, adaptable(native)[1])
    adapters = ckpt.AdapterLayout(native, found.chosen, found.rank, found.settings, placed=layout)
    for chunk, place in zip(chunks, places, strict=True):
        parts = {}
        for local, block in layout.at(place).items():
            if adapted := adapters.adapted(block):
                rows = {
                    name: [piece.local_range[0] for piece in block.pieces if piece.name == name]
                    for name in adapters.fused[block.names[0]]
                }
                parts[local.removeprefix(local_name("", place))] = [
                    Part(adapters.layer(name) if name in adapted else "", own) for name, own in rows.items()
                ]
        add_lora_(chunk, options, parts)
        if layout.role == "value" and chunk.post_process:
            chunk.output_layer.requires_grad_(True)
    return adapters
