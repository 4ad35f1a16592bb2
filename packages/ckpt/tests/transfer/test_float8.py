"""Weights that stay in FP8 have the values of a dense load at every place, from block FP8 and from plain weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt import Grid, Layout, Place, layout_for, load_hf, merge, reshard
from ckpt.transfer import parallel_reads
from ckpt.transfer.float8 import float8_sides

Checkpoints = Callable[..., Path]
# Over 4 ranks every block of 128 x 128 lies on several ranks, and the last ones are smaller.
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 30}
SIZES |= {"moe_intermediate_size": 144}


def held(folder: Path, layout: Layout, place: Place) -> dict[str, Tensor]:
    """The dense values of the weights of a place that are loaded in FP8."""
    sides, into = float8_sides(layout, [place]), {}
    for name, block in layout.at(place).items():
        into[name] = torch.empty(block.shape, dtype=torch.float8_e4m3fn if name in sides else torch.float32)
        if name in sides:
            *stack, rows, columns = block.shape
            counts = rows // sides[name][0], columns // sides[name][1]
            assert all(size % side == 0 for size, side in zip((rows, columns), sides[name], strict=True))
            into[f"{name}_scale_inv"] = torch.full((*stack, *counts), torch.nan)
    load_hf(folder, layout, place, into=into)
    found = {}
    for name, side in sides.items():
        scales = into[f"{name}_scale_inv"].repeat_interleave(side[0], -2).repeat_interleave(side[1], -1)
        found[name] = into[name].float() * scales
    return found


@pytest.mark.parametrize(
    ("family", "batch_bytes"),
    [
        ("qwen3-moe", 1 << 14),
        pytest.param("llama", parallel_reads.BATCH_BYTES, marks=pytest.mark.slow),
        pytest.param("deepseek-v2", parallel_reads.BATCH_BYTES, marks=pytest.mark.slow),
    ],
)
def test_every_place_has_the_values_of_the_whole(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, batch_bytes: int
) -> None:
    monkeypatch.setattr(parallel_reads, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr("ckpt.transfer.float8.BATCH_BYTES", batch_bytes)
    plain = checkpoint(family, **SIZES)
    merge(plain, tmp_path / "fp8", format="fp8")
    layout = layout_for(plain, target="parallel")
    for grid in (Grid(), Grid(tp=4), Grid(tp=2, ep=1 if family == "llama" else 2)):
        for place in grid.places():
            dense = load_hf(tmp_path / "fp8", layout, place, dtype=torch.float32)
            for source in (plain, tmp_path / "fp8"):
                found = held(source, layout, place)
                assert any(name.endswith("down_proj.weight") for name in found)
                assert any("experts" in name for name in found) == (family != "llama")
                for name, values in found.items():
                    assert torch.equal(values, dense[name]), f"{name} at {place}"


def test_what_cannot_stay_in_fp8_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    plain = checkpoint("llama", **SIZES)
    reshard(plain, tmp_path / "sharded", Grid(tp=2))
    layout = layout_for(plain, target="parallel")
    with pytest.raises(ValueError, match="a sharded checkpoint cannot be loaded in FP8; `ckpt merge` makes"):
        held(tmp_path / "sharded", layout, Place())
