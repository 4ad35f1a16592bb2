"""Views of a model."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.distributed import ProcessGroup

from parallel_layers.inference import decoding_attributes, view
from parallel_layers.invariant import tp_invariant
from parallel_layers.linear.execution import Placement
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.module import view_of
from parallel_layers.moe import MoEConfig
from parallel_layers.rotary.embedding import RotaryEmbedding
from parallel_layers.testing import RankPool


def modules_left(group: ProcessGroup | None, kind: str) -> list[str]:
    """Return the modules of a view that are there when nothing refers to the view."""
    sizes: Any = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 32}
    dense = DecoderConfig(**sizes)
    mixture = replace(dense, moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=16))
    configs = [dense, mixture, mixture, replace(dense, normalization="layer")]
    layers = (DecoderLayer(config, layer_number=n, placement=Placement(group)) for n, config in enumerate(configs))
    model = nn.ModuleList([nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)}), RotaryEmbedding(8)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "on_gpu", lambda x: True)  # experts have a `forward` of their own
        if kind == "invariant":
            copies = tp_invariant(model)
        else:
            attributes = decoding_attributes if kind == "decoding" else lambda copy: {}
            copies = view_of(model, lambda _, copy: copy.__dict__.update(attributes(copy)))
    modules = [weakref.ref(module) for module in copies.modules()]
    assert not any(module() in set(model.modules()) for module in modules)
    gc.disable()
    try:
        del copies
        return [type(module()).__name__ for module in modules if module() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["plain", "decoding", "invariant"])
def test_a_view_is_freed_with_its_last_reference(ranks: RankPool, kind: str) -> None:
    """It can hold gathered experts or FP8 copies, which must not wait for a garbage collection."""
    assert modules_left(None, kind) == []
    assert ranks.run(modules_left, kind, world=2) == [[], []]
