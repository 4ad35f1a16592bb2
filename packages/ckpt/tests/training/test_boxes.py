"""Ranks that do not reach the folder of a training checkpoint: other ranks write their files."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted
from torch import Tensor

from ckpt import Place, layout_for, load_hf, load_training, save_training
from ckpt.training import boxes
from ckpt.transfer import writing

Checkpoints = Callable[..., Path]


def optimizer_state(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {name: {"step": torch.tensor(7.0), "exp_avg": 2 * tensor} for name, tensor in tensors.items()}


def save_from_afar(group: Any, source: str, target: str, writers: list[int], full: int | None) -> Any:
    """Save while only some ranks reach the folder, one of which may find its disk full."""
    layout, place = layout_for(source), Place(tp=(group.rank() % 2, 2))
    tensors = load_hf(source, layout, place)
    create_files = boxes.create_files
    written: list[str] = []

    def create(folder: Path, plan: Any) -> None:
        written.extend(plan.contents)
        if group.rank() == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        create_files(folder, plan)

    with pytest.MonkeyPatch.context() as patch, counted("pwritev") as counts:
        patch.setattr(boxes, "reaching_ranks", lambda folder, group: writers)
        patch.setattr(boxes, "create_files", create)
        patch.setattr(writing, "plan_moves", functools.partial(writing.plan_moves, bucket_bytes=1000))
        try:
            state = optimizer_state(tensors)
            save_training(target, 3, tensors, layout, place, optimizer=state, group=group)
        except OSError as error:
            return str(error)
    return written, sum(counts)


@pytest.mark.parametrize("writers", [[0], [0, 2], pytest.param([0, 1, 2, 3], marks=pytest.mark.slow)])
def test_files_are_written_by_ranks_that_reach_the_folder(
    writers: list[int], checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    """Two of four ranks are replicas; each rank has a file all the same."""
    source, target = checkpoint("llama"), tmp_path / "saved"
    results = ranks.run(save_from_afar, str(source), str(target), writers, None, world=4)
    assert all(bool(count) == bool(files) for files, count in results)
    files = sorted(file for found, _ in results for file in found)
    assert len(set(files)) == len(files) == 4
    assert {rank for rank, (found, _) in enumerate(results) if found} == set(writers)
    layout = layout_for(source)
    loaded = load_training(target, layout, check=True)
    for name, tensor in load_hf(source, layout).items():
        assert torch.equal(loaded.tensors[name], tensor)
        assert torch.equal(loaded.optimizer[name]["exp_avg"], 2 * tensor)
        assert loaded.optimizer[name]["step"] == 7


def test_a_full_disk_at_the_writer_is_everybodys_error(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    source, target = checkpoint("llama"), tmp_path / "saved"
    for message in ranks.run(save_from_afar, str(source), str(target), [0], 0, world=4, timeout=60):
        assert f"the disk of {target} is full: the save needs" in message
        assert "(No space left on device)" in message
    assert not target.exists() or not any(target.iterdir())
