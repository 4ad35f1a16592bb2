from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt import Grid, Place, layout_for, load_hf
from ckpt.layout.place import place_layers


def test_a_rank_outside_its_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp=\(2, 2\)"):
        Place(tp=(2, 2))
    for size in (0, -1, 1.5, None, True, "2", 2**70):
        with pytest.raises(ValueError, match=r"Grid\(vpp=.*\): a size is an integer from 1 to"):
            Grid(vpp=size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"Place\(pp=.*\): "):
            Place(pp=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has 1,073,741,824 places; a grid has at most 1,048,576"):
        Grid(tp=1 << 15, pp=1 << 15)
    with pytest.raises(ValueError, match=r"Place\(tp=\(0.5, 2\)\): write tp=\(rank, size\), two integers"):
        Place(tp=(0.5, 2))  # type: ignore[arg-type]


def test_a_grid_lists_every_place_once() -> None:
    places = list(Grid(tp=2, pp=2, vpp=2, ep=2, etp=1).places())
    assert len(places) == len(set(places)) == 16
    assert {place.grid for place in places} == {Grid(2, 2, 2, 2, 1)}


def test_virtual_stages_are_interleaved() -> None:
    chunks = [Place(pp=(p, 2), vpp=(v, 2)).chunk for v in range(2) for p in range(2)]
    assert chunks == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([1, 3], [(0,), (1, 2, 3)]),
        ([3, 1], [(0, 1, 2), (3,)]),
        ([0, 4], [(), (0, 1, 2, 3)]),
    ],
)
def test_layers_are_placed_as_listed(layers: list[int], expected: list[tuple[int, ...]]) -> None:
    assert list(place_layers(4, 2, layers)) == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([10, 10, 10], "3 entries"),
        ([10, 10, 10, 1], "sums to 31"),
        ([[0], [1], [2], [3]], "unknown"),
        ("even", "unknown"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(layers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_layers(30, 4, layers)


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_a_value_model_is_read_from_a_language_models_files_onto_listed_layers(
    checkpoint: Callable[..., Path], model: str
) -> None:
    """Its head is missing there and theirs is not read: what the files hold otherwise is looked for, on no grid."""
    folder = checkpoint(model, num_hidden_layers=4)
    layout = layout_for(folder, role="value", layers=[1, 3])
    held = [load_hf(folder, layout, Place(pp=(stage, 2))) for stage in range(2)]
    whole = load_hf(folder, layout_for(folder, role="value"))
    assert held[0].keys() | held[1].keys() == whole.keys()
    for stage in held:
        for name, tensor in stage.items():
            assert torch.equal(tensor, whole[name]), name
