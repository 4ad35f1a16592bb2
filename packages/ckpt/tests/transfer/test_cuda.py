"""The same on a GPU: tensors there are read and written through reused pinned buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt.transfer.parallel_reads
from ckpt import (
    Place,
    layout_for,
    load_hf,
    load_training,
    save_hf,
    save_training,
    stream_hf,
)
from ckpt.files.boxio import Staging

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("staging", [100, 16 << 20])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_load_and_save_on_a_gpu(
    name: str,
    staging: int,
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckpt.files.boxio.STAGING_BYTES", staging)
    monkeypatch.setattr(ckpt.transfer.parallel_reads, "BATCH_BYTES", 1000)
    source = checkpoint(name)
    layout = layout_for(source)
    places = [Place(tp=(rank, 2)) for rank in range(2)]
    tensors = [load_hf(source, layout, place, device="cuda") for place in places]
    assert all(tensor.is_cuda for held in tensors for tensor in held.values())
    for place, held in zip(places, tensors, strict=True):
        assert_same({key: tensor.cpu() for key, tensor in held.items()}, load_hf(source, layout, place))
        into = {key: torch.nn.Parameter(torch.empty_like(tensor, dtype=torch.bfloat16)) for key, tensor in held.items()}
        load_hf(source, layout, place, into=into)
        assert all(torch.equal(into[key], tensor.bfloat16()) for key, tensor in held.items())
    save_hf(tmp_path / "saved", tensors, layout, places)
    assert_same(read_all(tmp_path / "saved"), read_all(source))


def test_parameters_are_filled_through_one_pinned_buffer_a_thread(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a stream of the caller's, which may not have come to the parameters' memory yet."""
    monkeypatch.setattr(ckpt.transfer.parallel_reads, "BATCH_BYTES", 1000)
    buffers: set[int] = set()
    view = Staging.view

    def pinned(self: Staging, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = view(self, shape, dtype, device)
        assert buffer.is_pinned()
        buffers.add(buffer.data_ptr())
        return buffer

    monkeypatch.setattr(Staging, "view", pinned)
    source = checkpoint("llama")
    layout = layout_for(source)
    expected = load_hf(source, layout)
    into = {name: torch.nn.Parameter(torch.empty_like(tensor, device="cuda")) for name, tensor in expected.items()}
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.cuda._sleep(10**8)
        for parameter in into.values():
            parameter.zero_()
        load_hf(source, layout, into=into, threads=2)
    assert 1 <= len(buffers) <= 2
    torch.cuda.synchronize()
    assert all(torch.equal(into[name].cpu(), tensor) for name, tensor in expected.items())


def test_live_transfers_on_a_gpu(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = load_hf(source, layout, device="cuda")
    streamed = dict(stream_hf(tensors, layout))
    assert all(tensor.is_cuda for tensor in streamed.values())
    assert_same({name: tensor.cpu() for name, tensor in streamed.items()}, read_all(source))
    for bucket_bytes in (1000, 1 << 20):
        on_host = dict(stream_hf(tensors, layout, device="cpu", bucket_bytes=bucket_bytes))
        assert all(tensor.is_pinned() for tensor in on_host.values())
        assert_same(on_host, read_all(source))
    for name, tensor in stream_hf(tensors, layout, device="cpu", dtype=torch.bfloat16, bucket_bytes=1000):
        assert torch.equal(tensor, streamed[name].bfloat16().cpu())  # its memory is freed, and used again
    optimizer = {name: {"step": torch.tensor(3.0), "exp_avg": tensor * 2} for name, tensor in tensors.items()}
    save_training(tmp_path / "run", 1, tensors, layout, optimizer=optimizer, asynchronous=True).wait()
    state = load_training(tmp_path / "run", layout, device="cuda")
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(state.optimizer[name]["exp_avg"], tensor * 2) for name, tensor in tensors.items())


def over_nccl(group: Any, source: str, folder: str) -> bool:
    """Stream, save and load over NCCL, from plain tensors on tp 2 and from DTensors on dp 2."""
    rank, device = group.rank(), torch.device("cuda", torch.cuda.current_device())
    layout = layout_for(source)
    whole = load_hf(source, layout, device=device)
    on_host = dict(stream_hf(load_hf(source, layout), layout))
    mesh = DeviceMesh.from_group(group, "cuda")
    divided = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    plain = load_hf(source, layout, Place(tp=(rank, 2)), device=device, group=group)
    for number, (tensors, place) in enumerate(((plain, Place(tp=(rank, 2))), (divided, Place()))):
        for name, tensor in stream_hf(tensors, layout, group, place, bucket_bytes=4096):
            assert tensor.is_cuda, name
        host = dict(stream_hf(tensors, layout, group, place, device="cpu", bucket_bytes=4096))
        assert all(torch.equal(tensor, on_host[name]) for name, tensor in host.items())
        save_hf(f"{folder}/{number}", tensors, layout, place, group=group)
        save_training(f"{folder}/run{number}", 1, tensors, layout, place, group=group)
    filled = {name: tensor * 0 for name, tensor in divided.items()}
    load_training(f"{folder}/run0", layout, into=filled, group=group)
    return all(torch.equal(tensor.full_tensor(), whole[name]) for name, tensor in filled.items())


@pytest.fixture
def devices() -> Iterator[Any]:
    """Two ranks, each with a GPU, over NCCL."""
    from parallel_layers.testing import RankPool

    with RankPool(2, backend="nccl") as pool:
        yield pool


@pytest.mark.gpu(2)
def test_two_gpus_over_nccl(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path, devices: Any
) -> None:
    source = checkpoint("llama-tied")
    assert devices.run(over_nccl, str(source), str(tmp_path)) == [True, True]
    assert_same(read_all(tmp_path / "0"), read_all(source))
    assert_same(read_all(tmp_path / "1"), read_all(source))
