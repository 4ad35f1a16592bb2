"""Arguments of a wrong type are refused by name, with what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ckpt import Grid, Layout, Place, layout_for, load_hf, merge, reshard, save_hf, save_training, stream_hf


class Given(NamedTuple):
    source: Path
    layout: Layout
    tensors: dict[str, Tensor]
    out: Path


def saving(**arguments: Any) -> Callable[[Given], Any]:
    return lambda given: save_training(
        given.out, **{"step": 1, "tensors": given.tensors, "layout": given.layout, **arguments}
    )


def streaming(**arguments: Any) -> Callable[[Given], Any]:
    return lambda given: list(stream_hf(given.tensors, given.layout, **arguments))


TEXT: Any = "bfloat16"
NAME = "model.norm.weight"
CASES: dict[str, tuple[Callable[[Given], Any], str]] = {
    "stream a dtype": (streaming(dtype=TEXT), "dtype='bfloat16' must be a torch.dtype, such as torch.bfloat16"),
    "save a dtype": (lambda it: save_hf(it.out, it.tensors, it.layout, dtype=TEXT), "must be a torch.dtype"),
    "load a dtype": (lambda it: load_hf(it.source, it.layout, dtype=TEXT), "must be a torch.dtype"),
    "reshard a dtype": (lambda it: reshard(it.source, it.out, Grid(), dtype=TEXT), "must be a torch.dtype"),
    "merge a dtype": (lambda it: merge(it.source, it.out, dtype=TEXT), "must be a torch.dtype"),
    "a list of extra": (saving(extra=[1]), r"extra=\[1\] must be a mapping of names to JSON values"),
    "a step in a text": (saving(step="1"), "step='1' must be an integer of at least 0"),
    "a keep in a text": (saving(keep="2"), "keep='2' must be an integer of at least 1, or None"),
    "a module": (saving(tensors=torch.nn.Linear(2, 2)), r"tensors is a Linear; pass .* a module's state_dict\(\)"),
    "flat moments": (saving(optimizer={NAME: torch.ones(32)}), f"optimizer\\['{NAME}'\\] must map slots to tensors"),
    "a count": (saving(optimizer={NAME: {"step": 3}}), f"optimizer\\['{NAME}'\\] must map slots to tensors"),
    "a generator": (
        saving(streams={"data": torch.Generator()}),
        r"\['data'\] is of type Generator; .* generator.get_state",
    ),
    "a module to save": (lambda it: save_hf(it.out, torch.nn.Linear(2, 2), it.layout), "tensors is a Linear; pass"),
    "no tensors": (lambda it: save_hf(it.out, dict.fromkeys(it.tensors, 1), it.layout), "is a int; pass a tensor of"),
    "a module to fill": (
        lambda it: load_hf(it.source, it.layout, into=torch.nn.Linear(2, 2)),
        "into is a Linear; pass",
    ),
    "one receiver": (streaming(to=0), r"to=0 must be ranks of the group, 0 to 0, such as \[0\]"),
    "a bucket in a text": (streaming(bucket_bytes="64MB"), "bucket_bytes='64MB' must be a positive number of bytes"),
    "no config": (lambda it: layout_for(None), "the configuration is a NoneType; pass a checkpoint folder"),
    "a padding in a text": (lambda it: layout_for(it.source, vocab_multiple="8"), "vocab_multiple='8' must be an int"),
    "a count of layers": (
        lambda it: layout_for(it.source, layers=2).at(Place()),
        "layers=2 is unknown; use None or a list of counts",
    ),
    "a size": (lambda it: reshard(it.source, it.out, 2), r"grid=2 must be a Grid, such as Grid\(tp=2\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_type_is_refused_by_name(case: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, (call, message) = checkpoint("llama"), CASES[case]
    layout = layout_for(source)
    with pytest.raises(ValueError, match=message):
        call(Given(source, layout, load_hf(source, layout), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inner", ["out", "deep/out"])
def test_a_file_in_the_place_of_a_folder_is_named(inner: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, file = checkpoint("llama"), tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ValueError, match=f"{file} is no folder, and {file / inner} would lie in it; choose another"):
        merge(source, file / inner)
    layout = layout_for(source)
    with pytest.raises(ValueError, match=f"{file} is no folder, and .*step-00000001 would lie in it"):
        save_training(file, 1, load_hf(source, layout), layout)
    assert file.read_text() == "precious"
