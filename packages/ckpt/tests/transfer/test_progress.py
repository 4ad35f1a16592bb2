"""Long operations report bytes done of bytes in all: the number never falls, and all are done at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt import Grid, layout_for, load_hf, merge, reshard, verify

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


def test_files_to_files(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Copies on several ranks count, a vocabulary's padding does not."""
    source = checkpoint("llama", vocab_size=51)
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    reshard(source, tmp_path / "one", Grid())
    whole = sum(tensor.nbytes for tensor in tensors.values())
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if tensor.dim() == 1)

    resharding, merging, comparing = Watch(), Watch(), Watch()
    reshard(tmp_path / "one", tmp_path / "two", Grid(tp=2), vocab_multiple=16, progress=resharding)
    # Each rank has the norms.
    assert resharding.ended_at() == whole + norms
    merge(tmp_path / "two", tmp_path / "merged", max_shard_size="20KB", progress=merging)
    assert merging.ended_at() == whole
    assert verify(source, tmp_path / "merged", progress=comparing).equal
    assert comparing.ended_at() == whole
