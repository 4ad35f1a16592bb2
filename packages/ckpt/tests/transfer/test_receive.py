"""Full tensors of a stream into the ranks of a grid, against what the same ranks load from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt import Grid, layout_for, load_hf
from ckpt.transfer.receive import receive_hf

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("llama", Grid(tp=2, pp=2)),
        ("qwen2-tied", Grid(pp=2)),
        ("qwen3-moe", Grid(tp=2, ep=2)),
        ("deepseek", Grid(pp=2, ep=2)),
        ("gpt-oss", Grid(tp=2)),
    ],
    ids=str,
)
def test_ranks_hold_what_they_load(name: str, grid: Grid, checkpoint: Checkpoints) -> None:
    source = checkpoint(name)
    layout, whole = layout_for(source, target="parallel"), load_file(source / "model.safetensors")
    for place in grid.places():
        expected = load_hf(source, layout, place)
        tensors = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        receive_hf(iter(whole.items()), layout, [(place, tensors)])
        for local, tensor in expected.items():
            padding = torch.ones_like(tensor, dtype=torch.bool)
            for piece in layout.at(place)[local].pieces:
                if not piece.is_padding:
                    padding[tuple(slice(*side) for side in piece.local_range)] = False
            assert torch.equal(tensors[local].masked_fill(padding, 0), tensor), local


def test_the_dtype_is_the_models(checkpoint: Checkpoints) -> None:
    source = checkpoint("llama")
    layout, whole = layout_for(source, target="parallel"), load_file(source / "model.safetensors")
    (place,) = Grid().places()
    expected = load_hf(source, layout, place, dtype=torch.bfloat16)
    tensors = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    receive_hf(whole.items(), layout, [(place, tensors)])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_what_does_not_fit_is_named(checkpoint: Checkpoints) -> None:
    source = checkpoint("llama")
    layout, whole = layout_for(source, target="parallel"), load_file(source / "model.safetensors")
    (place,) = Grid().places()
    chunks = [(place, load_hf(source, layout, place))]
    norm = whole.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"ended without model\.norm\.weight \(1 tensors"):
        receive_hf(whole.items(), layout, chunks)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has the shape \[1\]"):
        receive_hf([("model.norm.weight", norm[:1])], layout, chunks)
    with pytest.raises(ValueError, match=r"model\.norm\.weight came twice"):
        receive_hf([("model.norm.weight", norm)] * 2, layout, chunks)
    with pytest.raises(ValueError, match=r"norm is not a tensor of the model"):
        receive_hf([("norm", norm)], layout, chunks)
