"""Arguments that the ranks must pass alike: each lays the files out, and counts messages, by its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Place, layout_for, load_hf, load_training, save_hf, save_training, stream_hf

Checkpoints = Callable[..., Path]


def call(name: str, group: Any, source: str, target: str, differs: str) -> None:
    """Call a function in which the ranks differ in one argument."""
    odd = bool(group.rank())
    layout, place = layout_for(source), Place(tp=(group.rank(), 2))
    tensors = load_hf(source, layout, place)
    if differs == "layout" and odd:
        layout = layout_for(source, layers=[2])
    own: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "max_shard_size": 20_000,
        "bucket_bytes": 1000,
        "to": [1],
        "keep": 2,
    }
    options = {differs: own[differs]} if odd and differs in own else {}
    if name == "load_hf":
        load_hf(source, layout, place, group=group, **options)
    elif name == "save_hf":
        save_hf(target, tensors, layout, place, group=group, **options)
    elif name == "stream_hf":
        list(stream_hf(tensors, layout, group, place, **options))
    elif name == "save_training":
        save_training(target, 2 if differs == "step" and odd else 1, tensors, layout, place, group=group, **options)
    else:
        for step in (1, 2):
            save_training(target, step, tensors, layout, place, group=group)
        load_training(target, layout, place, group=group, step=1 + group.rank())


CASES = [
    *(("load_hf", differs) for differs in ("layout", "dtype")),
    *(("save_hf", differs) for differs in ("layout", "dtype", "max_shard_size")),
    *(("stream_hf", differs) for differs in ("layout", "dtype", "to", "bucket_bytes")),
    *(("save_training", differs) for differs in ("layout", "step", "keep")),
    ("load_training", "step"),
]


def messages(group: Any, source: str, target: str) -> list[str]:
    seen = []
    for name, differs in CASES:
        try:
            call(name, group, source, f"{target}/{name}", differs)
        except ValueError as error:
            seen.append(str(error))
        else:
            seen.append("nothing was raised")
    return seen


def test_arguments_that_differ_between_ranks_are_refused_on_all(
    checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    first, second = ranks.run(messages, str(checkpoint("llama")), str(tmp_path), world=2, timeout=60)
    assert first == second
    for (name, differs), message in zip(CASES, first, strict=True):
        assert message.startswith(f"{differs} differs between ranks: "), (name, differs, message)
    assert {entry.name for entry in tmp_path.iterdir()} == {"load_training"}


def test_ranks_that_receive_are_ranks_of_the_group(checkpoint: Checkpoints) -> None:
    layout = layout_for(checkpoint("llama"))
    with pytest.raises(ValueError, match=r"to=\[3, 0\] must be ranks of the group, 0 to 0"):
        list(stream_hf(load_hf(checkpoint("llama"), layout), layout, to=[3, 0]))
