"""Live transfers: streaming whole tensors, saving for ranks that do not reach the files."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted import counted
from torch import Tensor

from ckpt import (
    Checkpoint,
    Layout,
    Place,
    layout_for,
    load_hf,
    save_hf,
    stream_hf,
)
from ckpt.transfer.exchange import plan_moves

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]


def stream(group: Any, source: str, target: Any, to: list[int] | None, bucket_bytes: int) -> dict[str, Tensor]:
    layout = layout_for(source, target)
    place = Place(tp=(group.rank() % 2, 2), pp=(group.rank() // 2, 2))
    tensors = load_hf(source, layout, place)
    names = []
    full = {}
    for name, tensor in stream_hf(tensors, layout, group, place, to=to, bucket_bytes=bucket_bytes):
        names.append(name)
        full[name] = tensor
    assert names == (list(layout.canonical) if to is None or group.rank() in to else [])
    return full


@pytest.mark.parametrize(
    ("name", "target", "bucket_bytes"), [("llama-tied", "parallel", 4000), ("qwen3-moe", "megatron", 1 << 20)]
)
def test_streaming_yields_every_whole_tensor_in_order(
    name: str,
    target: str,
    bucket_bytes: int,
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    ranks: Any,
) -> None:
    folder = checkpoint(name, num_hidden_layers=2)
    expected = read_all(folder)
    for full in ranks.run(stream, str(folder), target, None, bucket_bytes, world=4):
        assert_same(full, expected)
    nobody, receiver, *_ = ranks.run(stream, str(folder), target, [1], bucket_bytes, world=4)
    assert nobody == {}
    assert_same(receiver, expected)


def stream_over_experts(group: Any, source: str, bucket_bytes: int) -> tuple[dict[str, Tensor], list[str], int, int]:
    """From pp 2 x ep 2, cast; also the order of the names, and the most bytes of whole tensors alive at once."""
    layout = layout_for(source)
    place = Place(pp=(group.rank() // 2, 2), ep=(group.rank() % 2, 2))
    tensors = load_hf(source, layout, place)
    full: dict[str, Tensor] = {}
    names: list[str] = []
    alive = most = largest = 0
    lock = threading.Lock()

    def gone(nbytes: int) -> None:
        nonlocal alive
        with lock:
            alive -= nbytes

    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal alive, most, largest
        tensor = empty(*args, **kwargs)
        nbytes = tensor.numel() * tensor.element_size()
        largest = max(largest, nbytes)
        alive += nbytes
        most = max(most, alive)
        weakref.finalize(tensor, gone, nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counting)
        stream = stream_hf(tensors, layout, group, place, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)
        for name, tensor in stream:
            names.append(name)
            full[name] = tensor.clone()
            del tensor
    return full, names, most, largest


@pytest.mark.parametrize("bucket_bytes", [pytest.param(2000, marks=pytest.mark.slow), 8000])
def test_streaming_over_stages_and_experts_casts_in_bounded_memory(
    bucket_bytes: int, checkpoint: Checkpoints, read_all: ReadAll, ranks: Any
) -> None:
    folder = checkpoint("qwen3-moe", num_hidden_layers=4, tie_word_embeddings=True)
    expected = read_all(folder)
    order = list(layout_for(folder).canonical)
    assert "lm_head.weight" not in order
    for full, names, most, largest in ranks.run(stream_over_experts, str(folder), bucket_bytes, world=4):
        assert names == order
        assert full.keys() == expected.keys()
        assert all(torch.equal(full[name], tensor.bfloat16()) for name, tensor in expected.items())
        # A bucket's whole tensors, one of them begun before it, and the two buffers of its communication.
        assert most <= 4 * bucket_bytes + 2 * largest


def test_streaming_from_one_process_casts(checkpoint: Checkpoints, read_all: ReadAll) -> None:
    folder = checkpoint("llama")
    layout = layout_for(folder)
    expected = read_all(folder)
    streamed = dict(stream_hf(load_hf(folder, layout), layout, dtype=torch.bfloat16))
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], tensor.bfloat16()) for name, tensor in expected.items())


def save_from_afar(group: Any, source: str, target: str, writers: list[int]) -> int:
    """Save while only some ranks reach the files; returns the bytes this rank wrote."""
    layout: Layout = layout_for(source)
    place = Place(tp=(group.rank(), 4))
    with pytest.MonkeyPatch.context() as patch, counted("pwritev") as written:
        patch.setattr("ckpt.transfer.save.reaching_ranks", lambda folder, group: writers)
        tensors = load_hf(source, layout, place)
        save_hf(target, tensors, layout, place, group=group, max_shard_size="20KB")
    return sum(written)


@pytest.mark.parametrize("writers", [[0], [0, 2]])
def test_pieces_travel_to_one_writer_per_file_where_not_all_reach_it(
    writers: list[int],
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    tmp_path: Path,
    ranks: Any,
) -> None:
    source, target = checkpoint("llama"), tmp_path / "saved"
    written = ranks.run(save_from_afar, str(source), str(target), writers, world=4)
    assert_same(read_all(target), read_all(source))
    assert [rank for rank, count in enumerate(written) if count] == writers
    load_hf(target, layout_for(target), check=True)
    assert len(Checkpoint.open(target).headers) > 1


def save_in_buckets(
    group: Any, source: str, target: str, writers: list[int], bucket_bytes: int
) -> tuple[list[tuple[int, int]], list[str]]:
    """Save while only some ranks reach the files; returns the bytes of each message to and from this rank, and the
    files that it opened."""
    layout = layout_for(source)
    place = Place(tp=(group.rank(), 4))
    tensors = load_hf(source, layout, place)
    messages: list[tuple[int, int]] = []
    opened: list[str] = []
    all_to_all = dist.all_to_all_single

    def recording(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
        messages.append((input.nbytes, output.nbytes))
        return all_to_all(output, input, *args, **options)

    def recorded(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return open(path, *args, **options)

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("a tensor travels by another call")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.transfer.save.reaching_ranks", lambda folder, group: writers)
        patch.setattr("ckpt.transfer.writing.plan_moves", functools.partial(plan_moves, bucket_bytes=bucket_bytes))
        patch.setattr("ckpt.transfer.writing.open", recorded, raising=False)
        patch.setattr(dist, "all_to_all_single", recording)
        for name in ("send", "isend", "broadcast", "gather", "all_gather_into_tensor"):
            patch.setattr(dist, name, refused)
        save_hf(target, tensors, layout, place, group=group, max_shard_size="20KB")
    return messages, opened


@pytest.mark.parametrize(
    ("writers", "bucket_bytes"), [([1], 4096), ([0, 2], 1000), pytest.param([0, 2], 100, marks=pytest.mark.slow)]
)
def test_pieces_travel_in_bounded_buckets_and_each_file_has_one_writer(
    writers: list[int],
    bucket_bytes: int,
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    tmp_path: Path,
    ranks: Any,
) -> None:
    source, target = checkpoint("llama"), tmp_path / "saved"
    results = ranks.run(save_in_buckets, str(source), str(target), writers, bucket_bytes, world=4)
    assert_same(read_all(target), read_all(source))
    largest = max(tensor.nbytes for tensor in read_all(source).values())
    for messages, _ in results:
        assert len(messages) > largest // bucket_bytes
        # A bucket, rounded up to the 16 bytes that a piece is aligned to.
        assert max(max(sizes) for sizes in messages) < bucket_bytes + 16
    files = [file for _, opened in results for file in opened]
    assert sorted(files) == sorted(file.name for file in Checkpoint.open(target).headers)
    assert len(files) > 1
    assert [rank for rank, (_, opened) in enumerate(results) if opened] == writers
