"""The same on a GPU: tensors there are read and written through one reused pinned buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt import Place, layout_for, load_hf, load_training, redistribute, save_hf, save_training, stream_hf, verify_live

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
    monkeypatch.setattr("ckpt.boxio.STAGING_BYTES", staging)
    source = checkpoint(name)
    layout = layout_for(source)
    places = [Place(tp=(rank, 2)) for rank in range(2)]
    tensors = [load_hf(source, layout, place, device="cuda") for place in places]
    assert all(tensor.is_cuda for held in tensors for tensor in held.values())
    for place, held in zip(places, tensors, strict=True):
        assert_same({key: tensor.cpu() for key, tensor in held.items()}, load_hf(source, layout, place))
        assert verify_live(source, held, layout, place).equal
        into = {key: torch.nn.Parameter(torch.empty_like(tensor, dtype=torch.bfloat16)) for key, tensor in held.items()}
        load_hf(source, layout, place, into=into)
        assert all(torch.equal(into[key], tensor.bfloat16()) for key, tensor in held.items())
    save_hf(tmp_path / "saved", tensors, layout, places)
    assert_same(read_all(tmp_path / "saved"), read_all(source))


def test_live_transfers_on_a_gpu(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    layout, megatron = layout_for(source), layout_for(source, "megatron")
    tensors = load_hf(source, layout, device="cuda")
    streamed = dict(stream_hf(tensors, layout))
    assert all(tensor.is_cuda for tensor in streamed.values())
    assert_same({name: tensor.cpu() for name, tensor in streamed.items()}, read_all(source))
    moved = redistribute(tensors, layout, Place(), megatron, Place(), device="cuda")
    assert_same({name: tensor.cpu() for name, tensor in moved.items()}, load_hf(source, megatron))
    optimizer = {name: {"step": torch.tensor(3.0), "exp_avg": tensor * 2} for name, tensor in tensors.items()}
    save_training(tmp_path, 1, tensors, layout, optimizer=optimizer, asynchronous=True).wait()
    state = load_training(tmp_path, layout, device="cuda")
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(state.optimizer[name]["exp_avg"], tensor * 2) for name, tensor in tensors.items())
