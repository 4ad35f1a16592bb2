"""Streamed tensors: buckets on the device hold the values, changes return, and nothing is read before it arrives."""

from __future__ import annotations

from random import Random

import pytest
import torch
from cpu_streams import CurrentStream, OtherStream
from torch import Tensor

from parallel_layers.memory import StreamedTensors, streamed


def at_random(seed: int) -> tuple[CurrentStream, OtherStream, OtherStream]:
    chance = Random(seed)
    return CurrentStream(), OtherStream(chance), OtherStream(chance)


def fill(streamed_tensors: StreamedTensors) -> list[Tensor]:
    """Seven tensors of three dtypes in host memory, each of its own number."""
    kinds = [torch.float32, torch.uint8, torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.uint8]
    found = streamed_tensors.zeros([torch.empty(3, n + 1, dtype=kind, device="meta") for n, kind in enumerate(kinds)])
    assert not any(tensor.any() for tensor in found)
    for number, tensor in enumerate(found):
        tensor.fill_(number + 1)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_changes_return_whatever_the_order_of_the_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = at_random(seed)
    monkeypatch.setattr(streamed, "_streams", lambda device: streams)
    host = StreamedTensors(torch.device("cpu"))
    tensors = fill(host)
    for changes in (True, False, True):
        buckets = [tensors[:1], tensors[1:3], tensors[3:4], tensors[4:5], tensors[5:6], tensors[6:]]
        before = [tensor.clone() for tensor in tensors]
        seen = []
        for bucket in host.visit(buckets, changes=changes):
            for here in bucket:
                seen.append(here.clone())
                here.add_(1)
        assert all(torch.equal(mine, its) for mine, its in zip(seen, before, strict=True))
        assert all(torch.equal(mine, its + changes) for mine, its in zip(tensors, before, strict=True))
    assert streams[1].pending + streams[2].pending == 0


def test_at_most_three_buckets_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = at_random(0)
    monkeypatch.setattr(streamed, "_streams", lambda device: streams)
    host = StreamedTensors(torch.device("cpu"))
    tensors = fill(host)
    places = {bucket[0].untyped_storage().data_ptr() for bucket in host.visit([[tensor] for tensor in tensors])}
    assert len(places) == 3
    assert not places & {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_on_a_cpu_nothing_is_copied() -> None:
    host = StreamedTensors(torch.device("cpu"))
    tensors = fill(host)
    (bucket,) = host.visit([tensors])
    assert all(mine is its for mine, its in zip(bucket, tensors, strict=True))
    assert list(host.visit([])) == []


@pytest.mark.gpu
def test_a_gpu_updates_what_lies_in_pinned_host_memory() -> None:
    host = StreamedTensors(torch.device("cuda", torch.cuda.current_device()))
    size = 1 << 22
    tensors = host.zeros([torch.empty(size, device="meta") for _ in range(12)])
    assert all(tensor.is_pinned() for tensor in tensors)
    resident = torch.ones(size, device="cuda")
    for count in range(1, 4):
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        for pair in host.visit([[tensor, resident] for tensor in tensors]):
            assert pair[1] is resident
            pair[0].add_(pair[1])
        assert torch.cuda.max_memory_allocated() - held <= 3 * 4 * size + 4096
        assert all(bool((tensor == count).all()) for tensor in tensors)
