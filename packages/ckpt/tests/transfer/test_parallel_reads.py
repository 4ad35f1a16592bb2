"""Several threads read what one would, within bounds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted

import ckpt.transfer.parallel_reads
from ckpt import Place, layout_for, load_hf
from ckpt.files.boxio import Staging
from ckpt.files.header import TensorInfo
from ckpt.transfer.parallel_reads import Read, read_all

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_any_number_of_threads_reads_the_same(
    threads: int, dtype: torch.dtype | None, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama", "20KB")
    layout, place = layout_for(folder), Place(tp=(1, 2))
    expected = load_hf(folder, layout, place, dtype=dtype)
    # Batches smaller than a row, so that reads are cut in every dimension.
    monkeypatch.setattr(ckpt.transfer.parallel_reads, "BATCH_BYTES", 100)
    with counted("preadv") as counts:
        tensors = load_hf(folder, layout, place, dtype=dtype, threads=threads)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert sum(counts) == sum(tensor.numel() * torch.float32.itemsize for tensor in expected.values())


def test_a_thread_has_one_buffer_at_most(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("llama")
    monkeypatch.setattr(ckpt.transfer.parallel_reads, "BATCH_BYTES", 100)
    buffers = 0
    made = Staging.__init__

    def counting(self: Staging) -> None:
        nonlocal buffers
        buffers += 1
        made(self)

    monkeypatch.setattr(Staging, "__init__", counting)
    load_hf(folder, layout_for(folder), dtype=torch.bfloat16, threads=3)
    assert buffers <= 3


def test_an_error_in_a_thread_ends_the_load(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("llama")
    monkeypatch.setattr(ckpt.transfer.parallel_reads, "BATCH_BYTES", 100)
    calls, preadv = 0, os.preadv

    def failing(*args: Any) -> int:
        nonlocal calls
        calls += 1
        return 0 if calls > 10 else preadv(*args)

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(ValueError, match="truncated while in use"):
            load_hf(folder, layout_for(folder), threads=2)
    assert threading.active_count() == before
    # What was not begun has been dropped.
    assert calls < 30
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        load_hf(folder, layout_for(folder), threads=0)


def test_a_file_that_vanishes_is_an_error_and_no_hang(tmp_path: Path) -> None:
    info = TensorInfo(torch.float32, (4,), 0)
    reads = [
        Read("tensor", tmp_path / f"{number}.safetensors", info, ((0, 4),), torch.empty(4)) for number in range(20)
    ]
    with pytest.raises(FileNotFoundError):
        read_all(reads, threads=2)


def test_tensors_of_inference_mode_are_filled(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    expected = load_hf(folder, layout_for(folder), dtype=torch.bfloat16)
    with torch.inference_mode():
        tensors = load_hf(folder, layout_for(folder), dtype=torch.bfloat16)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
