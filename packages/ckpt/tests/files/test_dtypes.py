"""A cast to a type of a narrower range: a value that does not fit is refused by name, wherever weights are cast."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import (
    Grid,
    Place,
    layout_for,
    load_hf,
    load_training,
    merge,
    reshard,
    save_hf,
    save_training,
    stream_hf,
)
from ckpt.files.dtypes import refuse_overflow

Checkpoints = Callable[..., Path]
DOWN = "model.layers.1.mlp.down_proj.weight"
HALF = torch.float16


def with_value(source: Path, target: Path, value: float) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors[DOWN][3, 5] = value
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


FILES: dict[str, Callable[[Path, Path], Any]] = {
    "load_hf": lambda source, out: load_hf(source, layout_for(source), dtype=HALF),
    "reshard": lambda source, out: reshard(source, out, Grid(tp=2), dtype=HALF),
    "merge": lambda source, out: merge(source, out, dtype=HALF),
}
LIVE: dict[str, Callable[[Any, Any, Path], Any]] = {
    "save_hf": lambda tensors, layout, out: save_hf(out, tensors, layout, dtype=HALF),
    "stream_hf": lambda tensors, layout, out: list(stream_hf(tensors, layout, dtype=HALF)),
}


@pytest.mark.parametrize("step", [*FILES, *LIVE])
def test_a_value_that_a_cast_would_make_infinite_is_refused(step: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    for value, fits in ((1e6, False), (-1e6, False), (65504.0, True), (math.inf, True), (math.nan, True)):
        source = with_value(checkpoint("llama"), tmp_path / f"{value}", value)
        layout = layout_for(source)

        def run(source: Path = source, layout: Any = layout) -> None:
            if step in FILES:
                FILES[step](source, tmp_path / "out")
            else:
                LIVE[step](load_hf(source, layout), layout, tmp_path / "out")

        if fits and (math.isfinite(value) or step != "save_hf"):
            run()
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            continue
        fault = " holds NaN or infinite values" if fits else r".* has a value of magnitude 1e\+06, which float16 cannot"
        with pytest.raises(ValueError, match=DOWN + fault):
            run()
        assert not (tmp_path / "out").exists()


def test_training_checkpoints_are_not_loaded_into_too_narrow_a_type(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = with_value(checkpoint("llama"), tmp_path / "source", 1e6)
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    save_training(tmp_path / "run", 1, tensors, layout, Place())
    halves = {name: torch.zeros_like(tensor, dtype=HALF) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=rf"{DOWN}.* has a value of magnitude 1e\+06"):
        load_training(tmp_path / "run", layout, into=halves)


def cast_as_rank(group: Any, source: str, out: str) -> list[str]:
    """Only rank 1 holds the value."""
    layout, place = layout_for(source), Place(tp=(group.rank(), 2))
    tensors = load_hf(source, layout, place)
    if group.rank() == 1:
        tensors[DOWN][3, 5] = 1e6
    steps: list[Callable[[], Any]] = [
        lambda: list(stream_hf(tensors, layout, group, place, dtype=HALF)),
        lambda: save_hf(out, tensors, layout, place, group=group, dtype=HALF),
    ]
    seen = []
    for step in steps:
        try:
            step()
        except ValueError as error:
            seen.append(str(error))
    return seen


def test_the_error_of_one_rank_is_the_error_of_all(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    seen = ranks.run(cast_as_rank, str(checkpoint("llama")), str(tmp_path / "out"), world=2, timeout=20)
    assert [len(texts) for texts in seen] == [2, 2]
    assert all(f"{DOWN} at tp=1/2 has a value of magnitude 1e+06" in text for texts in seen for text in texts)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        (torch.float16, 65519.0, True),  # rounds down to the largest
        (torch.float16, 65520.0, False),
        (torch.float8_e5m2, 6e4, True),
        (torch.float8_e5m2, 7e4, False),
        (torch.float32, 1e300, False),
        (torch.bfloat16, 1e38, True),
    ],
)
def test_what_rounds_to_the_largest_value_fits(dtype: torch.dtype, value: float, fits: bool) -> None:
    values: Tensor = torch.tensor([0.0, value], dtype=torch.float64)
    if fits:
        refuse_overflow("it", values, dtype)
    else:
        with pytest.raises(ValueError, match="it has a value of magnitude"):
            refuse_overflow("it", values, dtype)
