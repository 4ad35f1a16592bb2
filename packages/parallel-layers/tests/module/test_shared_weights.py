"""Views of a model."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

from parallel_layers.inference import decoding_attributes, view
from parallel_layers.invariant import tp_invariant
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.module import view_of
from parallel_layers.moe import MoEConfig


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def layers() -> nn.ModuleDict:
    config = DecoderConfig(
        hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24,
        moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=16),
    )  # fmt: skip
    return nn.ModuleDict({str(number): DecoderLayer(config, layer_number=number) for number in range(2)})


@pytest.mark.parametrize("kind", ["plain", "decoding", "invariant"])
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_view_is_freed_with_its_last_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can hold gathered experts or FP8 copies, which must not wait for a garbage collection."""
    monkeypatch.setattr(view, "on_gpu", lambda x: True)  # experts have a `forward` of their own
    model = layers()
    if kind == "invariant":
        copies = tp_invariant(model)
    else:
        attributes = decoding_attributes if kind == "decoding" else lambda copy: {}
        copies = view_of(model, lambda _, copy: copy.__dict__.update(attributes(copy)))
    modules = [weakref.ref(module) for module in copies.modules()]
    assert not any(module() in set(model.modules()) for module in modules)
    del copies
    assert [type(module()).__name__ for module in modules if module() is not None] == []
