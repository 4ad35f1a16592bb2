from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckpt.transfer.relay
from ckpt import (
    IOCounter,
    Place,
    layout_for,
    load_hf,
    load_shards,
    load_training,
    open_shards,
    save_shards,
    save_training,
)

Checkpoints = Callable[..., Path]


def optimizer_state(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {name: {"step": torch.tensor(7.0), "exp_avg": 2 * tensor} for name, tensor in tensors.items()}


def save_from_afar(group: Any, source: str, target: str, kind: str, writers: list[int], full: int | None) -> Any:
    """Save while only some ranks reach the folder, one of which may find its disk full."""
    layout, place = layout_for(source), Place(tp=(group.rank() % 2, 2))
    tensors, counter = load_hf(source, layout, place), IOCounter()
    options: dict[str, Any] = {"group": group, "counter": counter}
    reaches, create_files = ckpt.transfer.relay.reaches, ckpt.transfer.relay.create_files
    written: list[str] = []

    def create(folder: Path, plan: Any) -> None:
        written.extend(plan.contents)
        if group.rank() == full:
            raise OSError(errno.ENOSPC, "no space left")
        create_files(folder, plan)

    ckpt.transfer.relay.reaches = lambda folder: group.rank() in writers and reaches(folder)
    ckpt.transfer.relay.create_files = create
    ckpt.transfer.relay.BUCKET_BYTES = 1000
    try:
        if kind == "shards":
            save_shards(target, tensors, layout, place, **options)
        else:
            save_training(target, 3, tensors, layout, place, optimizer=optimizer_state(tensors), **options)
    except OSError as error:
        return str(error)
    finally:
        ckpt.transfer.relay.reaches, ckpt.transfer.relay.create_files = reaches, create_files
        ckpt.transfer.relay.BUCKET_BYTES = 64 << 20
    return written, counter.data_bytes


@pytest.mark.parametrize("writers", [[0], [0, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("kind", ["shards", "training"])
def test_files_are_written_by_ranks_that_reach_the_folder(
    writers: list[int], kind: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    """Two of four ranks are replicas, and write nothing of their own that the others have."""
    source, target = checkpoint("llama"), tmp_path / "saved"
    results = ranks.run(save_from_afar, str(source), str(target), kind, writers, None, world=4)
    assert all(bool(count) == bool(files) for files, count in results)
    files = sorted(file for found, _ in results for file in found)
    assert len(set(files)) == len(files) == (2 if kind == "shards" else 4)
    assert {rank for rank, (found, _) in enumerate(results) if found} <= set(writers)
    layout = layout_for(source)
    for rank in range(2):
        place = Place(tp=(rank, 2))
        expected = load_hf(source, layout, place)
        if kind == "shards":
            tensors, state = load_shards(target, place), {}
        else:
            loaded = load_training(target, layout, place)
            tensors, state = loaded.tensors, loaded.optimizer
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name
            if kind == "training":
                assert torch.equal(state[name]["exp_avg"], 2 * tensor), name
                assert state[name]["step"] == 7
    if kind == "shards":
        assert len(open_shards(target).headers) == 2


@pytest.mark.parametrize("kind", ["shards", "training"])
def test_a_full_disk_at_the_writer_is_everybodys_error(
    kind: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source, target = checkpoint("llama"), tmp_path / "saved"
    for message in ranks.run(save_from_afar, str(source), str(target), kind, [0], 0, world=4, timeout=60):
        assert "no space left" in message
        assert f"the disk of {tmp_path if kind == 'shards' else target} is full: the save needs" in message
    assert not target.exists() or not any(target.iterdir())
