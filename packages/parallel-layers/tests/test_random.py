"""Named random streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.random import RngStates
from parallel_layers.testing import RankPool


def streams(device: str = "cpu") -> RngStates:
    states = RngStates(device)
    states.add("a", 1)
    states.add("b", 2)
    return states


def draws(seed: int, n: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((), generator=generator).item() for _ in range(n)]


def draw() -> float:
    return torch.rand(()).item()


def test_a_stream_goes_on_where_it_stopped_and_leaves_the_default_alone() -> None:
    states = streams()
    torch.manual_seed(3)
    a, default = draws(1, 2), draws(3, 2)
    with states.fork("a"):
        assert draw() == a[0]
    assert draw() == default[0]
    with states.fork("a"):
        assert draw() == a[1]
    assert draw() == default[1]


def test_forks_nest_also_in_themselves() -> None:
    states = streams()
    a, b = draws(1, 4), draws(2, 1)
    with states.fork("a"):
        assert draw() == a[0]
        with states.fork("b"):
            assert draw() == b[0]
            with states.fork("a"):
                assert draw() == a[1]
        assert draw() == a[2]
        with states.fork("a"):
            assert draw() == a[3]


def test_an_exception_leaves_the_streams_in_order() -> None:
    states = streams()
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="no stream"), states.fork("a"), states.fork(f"none after {draw()}"):
        pass
    assert draw() == draws(3, 1)[0]
    with states.fork("a"):
        assert draw() == draws(1, 2)[1]


@pytest.mark.parametrize("inside", [False, True])
def test_snapshot_and_replay(inside: bool) -> None:
    states = streams()
    torch.manual_seed(3)

    def some() -> list[float]:
        values = [draw()]
        with states.fork("a"):
            values.append(draw())
            with states.fork("b"):
                values.append(draw())
        return values

    def check() -> None:
        snapshot = states.state_dict()
        first = some()
        second = some()
        with states.replay(snapshot):
            assert some() == first
            assert some() == second
        third = some()
        states.load_state_dict(snapshot)
        assert [some(), some(), some()] == [first, second, third]

    if inside:
        with states.fork("b"):
            check()
    else:
        check()


def test_mistakes() -> None:
    states = streams()
    with pytest.raises(ValueError, match=r"no stream 'c'; streams are \['a', 'b'\]"), states.fork("c"):
        pass
    for name in ("a", "default"):
        with pytest.raises(ValueError, match="there is a stream"):
            states.add(name, 1)
    with pytest.raises(ValueError, match="not a snapshot"):
        states.load_state_dict({"a.cpu": torch.zeros(1, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="neither a CPU nor a CUDA device"):
        RngStates("meta")


def dropout(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    states = RngStates.tensor_parallel(7, group)
    masks = []
    for name in ("replicated", "sharded"):
        with states.fork(name):
            masks.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
    return masks[0], masks[1]


def test_dropout_agrees_where_replicated_and_differs_where_sharded(ranks: RankPool) -> None:
    results = ranks.run(dropout)
    assert all(torch.equal(replicated, results[0][0]) for replicated, _ in results)
    assert len({tuple(sharded.tolist()) for _, sharded in results} | {tuple(results[0][0].tolist())}) == 5


@pytest.mark.gpu(1)
def test_cuda_streams() -> None:
    states = streams("cuda")
    torch.manual_seed(3)
    snapshot = states.state_dict()
    with states.fork("a"):
        first = torch.rand(4, device="cuda"), torch.rand(4)
        with states.fork("b"):
            torch.rand(1, device="cuda")
    outside = torch.rand(4, device="cuda")
    states.load_state_dict(snapshot)
    torch.testing.assert_close(torch.rand(4, device="cuda"), outside, rtol=0, atol=0)
    with states.fork("a"):
        again = torch.rand(4, device="cuda"), torch.rand(4)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
