"""Copies of a tied embedding on two pipeline stages: where one of them would be taken, they must be the same.

That is so when a live model is streamed or moved, and when a training run is saved; `save_hf` is tested with the rest
of its refusals in test_save.py, and reading gives every stage the same anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ckpt import (
    Grid,
    Layout,
    Place,
    layout_for,
    load_hf,
    load_training,
    merge,
    reshard,
    save_training,
    stream_hf,
    verify,
)
from ckpt.transfer.sources import open_source

Checkpoints = Callable[..., Path]
HEAD = {"parallel": "lm_head.weight", "megatron": "output_layer.weight"}
State = dict[str, dict[str, Tensor]]


def optimizer_of(tensors: dict[str, Tensor]) -> State:
    return {name: {"step": torch.tensor(7.0), "exp_avg": 2 * tensor} for name, tensor in tensors.items()}


def spoil(tensors: dict[str, Tensor], state: State, what: str, target: str) -> None:
    """Change one element of the last stage's copy, or of its optimizer state."""
    if what == "weight":
        tensors[HEAD[target]][-1, -1] += 1
    elif what == "moment":
        state[HEAD[target]]["exp_avg"][0, 0] += 1
    elif what == "count":
        state[HEAD[target]]["step"] += 1


def use(operation: str, tensors: Any, state: Any, layout: Layout, place: Any, group: Any, root: Path) -> None:
    """Stream the model, or save it."""
    if operation == "stream":
        for _ in stream_hf(tensors, layout, group, place):
            pass
    else:
        asynchronous = operation == "save_training in the background"
        own = dist.new_group(backend="gloo") if asynchronous else group
        pending = save_training(root, 1, tensors, layout, place, optimizer=state, group=own, asynchronous=asynchronous)
        pending.wait(timeout=60)


def on_stages(group: Any, source: str, root: Path, target: Any, operation: str, what: str) -> str:
    layout, place = layout_for(source, target), Place(tp=(group.rank() % 2, 2), pp=(group.rank() // 2, 2))
    tensors = load_hf(source, layout, place)
    state = optimizer_of(tensors)
    if group.rank() == 3:
        spoil(tensors, state, what, target)
    try:
        use(operation, tensors, state, layout, place, group, root)
    except ValueError as error:
        return str(error)
    return "done"


CASES = [
    ("stream", "weight"),
    ("save_training", "weight"),
    ("save_training", "moment"),
    ("save_training", "count"),
    ("save_training in the background", "weight"),
]


@pytest.mark.parametrize("target", ["parallel", pytest.param("megatron", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("operation", "what"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] == "save_training" and case[1] != "count" else ())
        for case in CASES
    ],
)
def test_stages_whose_copies_differ_are_told_on_every_rank(
    operation: str, what: str, target: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = str(checkpoint("llama-tied"))
    seen = ranks.run(on_stages, source, tmp_path, target, operation, what, world=4, timeout=60)
    assert len(set(seen)) == 1
    assert "model.embed_tokens.weight has copies that differ in " in seen[0]
    # The place of each version: of the rows that tp rank 1 holds, or of what every rank has one of.
    first, second = seen[0].split("; other values on ")
    assert "rank 1 (" in first
    assert second.startswith("rank 3 (")
    assert list(tmp_path.iterdir()) == []
    assert ranks.run(on_stages, source, tmp_path, target, operation, "nothing", world=4, timeout=60) == ["done"] * 4
    if operation.startswith("save_training"):
        tensors = load_training(tmp_path, layout_for(source)).tensors
        assert all(torch.equal(tensors[name], tensor) for name, tensor in load_hf(source, layout_for(source)).items())


@pytest.mark.parametrize(
    ("operation", "what"), [case for case in CASES if "background" not in case[0] and "save" not in case[0]]
)
def test_one_process_with_both_stages_is_told_too(
    operation: str, what: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama-tied")
    layout, places = layout_for(source), [Place(pp=(stage, 2)) for stage in range(2)]
    tensors = [load_hf(source, layout, place) for place in places]
    states = [optimizer_of(held) for held in tensors]
    use(operation, tensors, states, layout, places, None, tmp_path)
    spoil(tensors[1], states[1], what, "parallel")
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has copies that differ"):
        use(operation, tensors, states, layout, places, None, tmp_path)


def test_training_refuses_differing_chunks_of_one_process(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """There the chunks' tensors are one mapping."""
    source = checkpoint("llama-tied")
    layout, places = layout_for(source), [Place(pp=(stage, 2)) for stage in range(2)]
    tensors = {name: tensor for place in places for name, tensor in load_hf(source, layout, place).items()}
    tensors["lm_head.weight"][3, 4] += 1
    with pytest.raises(ValueError, match=r"model/model.embed_tokens.weight has copies that differ"):
        save_training(tmp_path, 1, tensors, layout, places)
    assert list(tmp_path.iterdir()) == []


def test_files_whose_copies_differ_are_not_converted(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, shards = checkpoint("llama-tied"), tmp_path / "shards"
    reshard(source, shards, Grid(tp=2, pp=2), target="megatron")
    merge(shards, tmp_path / "whole")
    # The last element of the last stage's second rank.
    path, info = open_source(shards).tensors[f"3:{HEAD['megatron']}"]
    with open(path, "r+b") as file:
        file.seek(info.offset + info.nbytes - 4)
        file.write(torch.tensor(8.0).numpy().tobytes())
    names = {entry.name for entry in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"embed_tokens.weight has copies that"):
        reshard(shards, tmp_path / "again", Grid())
    with pytest.raises(ValueError, match=r"embed_tokens.weight has copies that"):
        merge(shards, tmp_path / "other")
    assert {entry.name for entry in tmp_path.iterdir()} == names
    assert not verify(source, shards).equal
