"""The plan of a stream to all ranks: its work grows with the ranks, not with their square, and it is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ckpt import Layout, Place, layout_for, stream_hf
from ckpt.transfer import holdings as stock

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "head_dim": 1,
    "vocab_size": 64,
}


class Simulated:
    """A group in which this process is rank 0, and the others' messages are made up."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def tensors_at(layout: Layout, place: Place) -> dict[str, Tensor]:
    return {name: torch.zeros(block.shape) for name, block in layout.at(place).items()}


def calls_of(step: Callable[[], object]) -> int:
    """The number of functions, of Python and of C, that a step calls."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def work(ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of rank 0's first and second stream, and of one of other tensors, in a tp group of so many ranks."""
    layout = layout_for(CONFIG)
    places = [Place(tp=(rank, ranks)) for rank in range(ranks)]
    described = []
    for place in places:
        whole = {name: (t, tuple((0, n) for n in t.shape)) for name, t in tensors_at(layout, place).items()}
        described.append(stock._describe([(place, whole)]))

    def gathered(message: Any, group: object) -> list[Any]:
        # What the ranks hold differs; of all else each says the same.
        return described if isinstance(message, list) and isinstance(message[0], dict) else [message] * ranks

    for module in ("agreement", "holdings", "tied"):
        monkeypatch.setattr(f"ckpt.transfer.{module}.all_gather_json", gathered)
    monkeypatch.setattr("ckpt.transfer.exchange.group_device", lambda group: torch.device("cpu"))
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: None)
    group: Any = Simulated(ranks)

    def stream(tensors: dict[str, Tensor]) -> None:
        assert sum(1 for _ in stream_hf(tensors, layout, group, places[0])) == len(layout.canonical)

    mine = tensors_at(layout, places[0])
    return [calls_of(lambda: stream(mine)), calls_of(lambda: stream(tensors_at(layout, places[0])))]


def test_the_work_is_linear_in_the_ranks_and_the_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = work(16, monkeypatch), work(64, monkeypatch)
    for stream in range(2):
        assert many[stream] < 4.5 * few[stream], (few, many)
    assert many[1] < many[0] / 2, many


def test_other_tensors_and_receivers_are_planned_anew() -> None:
    layout = layout_for({**CONFIG, "tie_word_embeddings": True})
    tensors = {name: torch.randn(block.shape) for name, block in layout.at(Place()).items()}
    for dtype in (torch.float32, torch.float64):
        for bucket_bytes in (4096, 100):
            for to in (None, [0]):
                own = {name: tensor.to(dtype) for name, tensor in tensors.items()}
                streamed = dict(stream_hf(own, layout, to=to, bucket_bytes=bucket_bytes))
                assert streamed.keys() == layout.canonical.keys()
                assert torch.equal(streamed["model.norm.weight"], own["model.norm.weight"])
    # A plan holds no tensor, which it would keep alive.
    assert not any(chunk.tensors for chunks in layout.kept["holdings"].ranks for chunk in chunks)
