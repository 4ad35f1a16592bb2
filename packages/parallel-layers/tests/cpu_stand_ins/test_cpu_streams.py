"""Streams of the stand-in for symmetric memory: in order, as waited for, and nothing lost."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_peer_memory import peer_memory_on_cpu
from cpu_streams import CurrentStream, OtherStream
from torch import Tensor

from parallel_layers.linear import symmetric_memory

AT_ONCE: Any = SimpleNamespace(random=lambda: 0.0)
LATE: Any = SimpleNamespace(random=lambda: 1.0)


def product_and_copy(stream: OtherStream) -> tuple[Tensor, Tensor]:
    """Both are queued on `stream`, the copy behind the product whose result it takes."""
    y, copy = torch.zeros(2, 2), torch.zeros(2, 2)
    with stream:
        torch.mm(torch.ones(2, 2), torch.eye(2), out=y)
        copy.copy_(y)
    return y, copy


@pytest.mark.parametrize(("chance", "value"), [(AT_ONCE, 1.0), (LATE, 0.0)], ids=["at once", "late"])
def test_work_is_done_when_it_is_waited_for(chance: Any, value: float) -> None:
    stream, main = OtherStream(chance), CurrentStream()
    y, copy = product_and_copy(stream)
    assert torch.equal(y, torch.full((2, 2), value))
    assert stream.pending == (0 if value else 2)
    main.wait_stream(stream)
    assert torch.equal(y, torch.ones(2, 2))
    assert torch.equal(copy, torch.ones(2, 2))
    assert stream.pending == 0


def test_a_stream_waits_for_another_up_to_its_event() -> None:
    first, second, main = OtherStream(LATE), OtherStream(LATE), CurrentStream()
    y, _ = product_and_copy(first)
    event = first.record_event()
    late, _ = product_and_copy(first)
    taken = torch.zeros(2, 2)
    second.wait_event(event)
    with second:
        taken.copy_(y)
    main.wait_stream(second)
    assert torch.equal(taken, torch.ones(2, 2))
    assert torch.equal(late, torch.zeros(2, 2))
    assert first.pending == 2


def test_chance_takes_both_ways_and_is_the_same_on_every_rank() -> None:
    pending = []
    for _ in range(2):
        stream = OtherStream(Random(0))
        pending.append([product_and_copy(stream) and stream.pending for _ in range(20)])
    assert pending[0] == pending[1]
    assert len(set(pending[0])) > 1


def leave_work_behind() -> None:
    with peer_memory_on_cpu():
        side: Any = symmetric_memory._streams(torch.device("cpu"))[1]
        side._chance = LATE
        product_and_copy(side)


def test_what_nothing_waits_for_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not wait for 2 call"):
        leave_work_behind()


def test_without_a_stream_calls_are_made_at_once() -> None:
    called = []
    OtherStream.defer(lambda: called.append(1))
    assert called == [1]
