"""Named random streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.memory.random_states import RngStates
from parallel_layers.testing import RankPool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def streams(device: str = "cpu") -> RngStates:
    states = RngStates(device)
    states.add("a", 1)
    states.add("b", 2)
    return states


def draws(seed: int, n: int, device: str = "cpu") -> list[float]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.rand((), device=device, generator=generator).item() for _ in range(n)]


def draw(device: str = "cpu") -> float:
    return torch.rand((), device=device).item()


def test_a_stream_goes_on_where_it_stopped_and_leaves_the_default_alone(device: str) -> None:
    states = streams(device)
    torch.manual_seed(3)
    a, default = draws(1, 2, device), draws(3, 2, device)
    with states.fork("a"):
        assert draw(device) == a[0]
    assert draw(device) == default[0]
    with states.fork("a"):
        assert draw(device) == a[1]
    assert draw(device) == default[1]


def test_forks_nest_also_in_themselves(device: str) -> None:
    states = streams(device)
    a, b = draws(1, 4, device), draws(2, 1, device)
    with states.fork("a"):
        assert draw(device) == a[0]
        with states.fork("b"):
            assert draw(device) == b[0]
            with states.fork("a"):
                assert draw(device) == a[1]
        assert draw(device) == a[2]
        with states.fork("a"):
            assert draw(device) == a[3]


def test_an_exception_leaves_the_streams_in_order() -> None:
    states = streams()
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="no stream"), states.fork("a"), states.fork(f"none after {draw()}"):
        pass
    assert draw() == draws(3, 1)[0]
    with states.fork("a"):
        assert draw() == draws(1, 2)[1]


@pytest.mark.parametrize("inside", [False, True])
def test_snapshot_and_replay(inside: bool, device: str) -> None:
    states = streams(device)
    torch.manual_seed(3)

    def some() -> list[float]:
        values = [draw(device)]
        with states.fork("a"):
            values.append(draw(device))
            with states.fork("b"):
                values.append(draw(device))
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
    with pytest.raises(ValueError, match="must be a CPU or a CUDA device"):
        RngStates("meta")


def dropout(group: ProcessGroup, device: str = "cpu") -> tuple[Tensor, Tensor]:
    states = RngStates.tensor_parallel(7, group, device)
    masks = []
    for name in ("replicated", "sharded"):
        with states.fork(name):
            masks.append(torch.nn.functional.dropout(torch.ones(64, device=device), 0.5))
    return masks[0], masks[1]


def test_dropout_agrees_where_replicated_and_differs_where_sharded(ranks: RankPool) -> None:
    results = ranks.run(dropout)
    assert all(torch.equal(replicated, results[0][0]) for replicated, _ in results)
    assert len({tuple(sharded.tolist()) for _, sharded in results} | {tuple(results[0][0].tolist())}) == 5


def test_dropout_of_two_ranks(on_two_ranks: Callable[..., list[Any]]) -> None:
    (replicated, sharded), (other_replicated, other_sharded) = on_two_ranks(dropout)
    assert torch.equal(replicated, other_replicated)
    assert len({tuple(mask.tolist()) for mask in (replicated, sharded, other_sharded)}) == 3


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


def test_a_seed_gives_the_streams_that_it_always_gave() -> None:
    states = RngStates.tensor_parallel(5, None)
    expected = {"replicated": [236996814, 1423042237, 1562238070], "sharded": [1721119131, 1132472770, 497670048]}
    for name, numbers in expected.items():
        with states.fork(name):
            assert torch.randint(2**31, (3,)).tolist() == numbers
