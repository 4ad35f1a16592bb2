"""Long operations report bytes done of bytes in all: the number never falls, and all are done at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt.comparison.compare
import ckpt.transfer.save
from ckpt import Grid, IOCounter, Place, layout_for, load_hf, merge, reshard, save_hf, verify

Checkpoints = Callable[..., Path]


class Watch(list[tuple[int, int]]):
    """Takes what is shown."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def ended_at(self) -> int:
        """The bytes in all, once it is sure that they were known from the beginning and reached in steps."""
        assert len(self) > 5
        assert {total for _, total in self} == {self[-1][0]}
        assert [done for done, _ in self] == sorted({done for done, _ in self})
        return self[-1][0]


def stored_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_hf(folder, layout_for(folder)).values())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_loading_and_saving(
    dtype: torch.dtype | None, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are read are those of the files, whatever they are cast to; those written are the result's."""
    monkeypatch.setattr("ckpt.transfer.parallel_reads.BATCH_BYTES", 1000)
    source = checkpoint("llama", "20KB")
    layout, places = layout_for(source), [Place(tp=(rank, 2)) for rank in range(2)]
    loading, saving = Watch(), Watch()
    first = load_hf(source, layout, places[0], dtype=dtype, progress=loading)
    assert loading.ended_at() == sum(tensor.numel() * torch.float32.itemsize for tensor in first.values())
    tensors = [first, load_hf(source, layout, places[1], dtype=dtype)]
    save_hf(tmp_path / "saved", tensors, layout, places, progress=saving)
    assert saving.ended_at() == stored_bytes(tmp_path / "saved")


def save_and_watch(group: Any, source: str, target: str, writers: list[int]) -> tuple[Watch, int]:
    layout, place = layout_for(source), Place(tp=(group.rank() % 2, 2))
    tensors, saving, counter = load_hf(source, layout, place), Watch(), IOCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.transfer.save, "_can_write", lambda *_: group.rank() in writers)
        save_hf(target, tensors, layout, place, group=group, max_shard_size="20KB", progress=saving, counter=counter)
    return saving, counter.data_bytes


@pytest.mark.parametrize("writers", [[0, 1, 2, 3], [0, 2]])
def test_the_first_rank_alone_shows_what_it_writes(
    writers: list[int], checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = checkpoint("llama")
    (first, written), *others = ranks.run(save_and_watch, str(source), str(tmp_path / "saved"), writers, world=4)
    assert Watch(first).ended_at() == written > 0
    assert all(not shown for shown, _ in others)
    assert sum(nbytes for _, nbytes in others) + written == stored_bytes(source)


def test_files_to_files(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on several ranks count, a vocabulary's padding does not."""
    monkeypatch.setattr("ckpt.comparison.compare._CHUNK_ELEMENTS", 1000)
    source = checkpoint("llama", vocab_size=51)
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    reshard(source, tmp_path / "one", Grid())
    whole = sum(tensor.nbytes for tensor in tensors.values())
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if tensor.dim() == 1)

    resharding, merging, comparing, alike = Watch(), Watch(), Watch(), Watch()
    reshard(tmp_path / "one", tmp_path / "two", Grid(tp=2), vocab_multiple=16, progress=resharding)
    # Each rank has the norms.
    assert resharding.ended_at() == whole + norms
    merge(tmp_path / "two", tmp_path / "merged", max_shard_size="20KB", progress=merging)
    assert merging.ended_at() == whole
    assert verify(source, tmp_path / "merged", progress=comparing).equal
    assert comparing.ended_at() == whole
    assert verify(tmp_path / "one", tmp_path / "two", progress=alike).equal
    assert alike.ended_at() == whole + norms


def test_what_is_not_compared_does_not_count(checkpoint: Checkpoints) -> None:
    """Tensors that one side lacks, or has in another shape."""
    comparing = Watch()
    first, second = checkpoint("llama"), checkpoint("llama-tied", vocab_size=51)
    assert not verify(first, second, progress=comparing).equal
    tensors = load_hf(first, layout_for(first))
    apart = ("model.embed_tokens.weight", "lm_head.weight")
    assert comparing.ended_at() == sum(tensor.nbytes for name, tensor in tensors.items() if name not in apart)
