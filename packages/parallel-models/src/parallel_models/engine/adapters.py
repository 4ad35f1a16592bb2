"""Low-rank adapters (LoRA) on a model: which layers have them, and their description for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

import ckpt
from ckpt.layout import EXPERTS, adaptable
from ckpt.transfer import TensorFiles, open_adapter
from parallel_layers.model import LoraOptions
from parallel_models.engine.options import Lora


class Adapters(NamedTuple):
    """The adapters of a model: their options, the layout of their tensors, and the files that hold them (None: new)."""

    options: LoraOptions
    layout: ckpt.AdapterLayout
    files: TensorFiles | None


def describe(lora: Lora, layout: ckpt.Layout, source: str) -> Adapters:
    """Describe a model's adapters by their options, or by a folder of PEFT, which is read once.

    `layout` is the layout of the model on the native layers, and `source` the folder of the model.

    Raises:
        ValueError: A target matches nothing, the embedding or the head is tied and cannot have a separate adapter,
            or the folder holds no adapter of this model.
    """
    if not isinstance(lora, LoraOptions):
        files, stored = open_adapter(lora, layout)
        settings = stored.settings
        options = LoraOptions(
            stored.rank,
            float(settings["lora_alpha"]),
            tuple(sorted(stored.chosen)),
            float(settings["lora_dropout"] or 0.0),
            bool(settings["use_rslora"]),
            shared_experts=bool(settings.get("shared_experts")),
        )
        return Adapters(options, stored, files)
    names, linear = adaptable(layout)
    layers = list(dict.fromkeys(name for sources in names.values() for name in sources))
    chosen = lora.choose(layers, linear)
    if layout.tied and (tied := [name for name in chosen if name.endswith(("embed_tokens", "lm_head"))]):
        raise ValueError(
            f"{tied[0]} is tied to the head, and an adapter would untie them; leave it out of targets={lora.targets!r}"
        )
    settings = {
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "base_model_name_or_path": os.path.abspath(source),  # a later reader has another working directory
    }
    if lora.shared_experts:
        experts = {name for local, sources in names.items() if local.endswith(EXPERTS) for name in sources}
        if not experts.intersection(chosen):
            raise ValueError(
                f"shared_experts=True, and targets={lora.targets!r} has no experts; add experts.gate_up_proj and "
                "experts.down_proj to the targets, or leave shared_experts out"
            )
        settings["shared_experts"] = True
    return Adapters(lora, ckpt.AdapterLayout(layout, chosen, lora.rank, settings), None)


def require_linears(backend: str, adapters: ckpt.AdapterLayout, linears: Collection[str]) -> None:
    """Raise ValueError unless all adapted layers are among the layers that a backend can adapt."""
    if other_layers := sorted(adapters.chosen.difference(linears)):
        raise ValueError(
            f"backend={backend!r} offers adapters of the layers' linears, and not of {', '.join(other_layers[:3])}; "
            "leave it out of the targets, or use backend='parallel'"
        )
