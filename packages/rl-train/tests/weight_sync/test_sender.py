"""Weight syncs to engines in other processes: what stays, what breaks off, and in which phase."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_models import SamplingOptions
from rl_train.engines import EnginePool, processes
from rl_train.engines.interface import Request, WeightsLostError
from rl_train.weight_sync import sender
from rl_train.weight_sync.buckets import Bucket, NamedTensors, in_buckets

from .engines import Watchful, in_file, tensors

BUCKET = 8192


class Group:
    """Engines on `devices`; `mark` asks one of them to end, and `told` says which were lost."""

    def __init__(self, mark: Path, devices: Sequence[str] = ("", ""), **options: Any) -> None:
        self.mark, self.told = mark, list[str]()
        engines = processes(partial(Watchful, mark, **options), devices, silence=30.0)
        self.pool = EnginePool(engines, bucket_bytes=BUCKET, tell=self.told.append)

    def versions(self) -> set[float]:
        """Return the versions of the weights that responses come from."""
        requests = [Request([1], number) for number in range(4)]
        answers = self.pool.begin(requests, SamplingOptions(1))()
        return {response.log_probs[0] for answer in answers for response in answer}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two engines; each test leaves them whole."""
    made = Group(tmp_path_factory.mktemp("two") / "mark")
    yield made
    made.pool.close()


def count_messages(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the calls of the first engine."""
    engine, calls = group.pool.engines[0], list[str]()
    submit = engine.submit

    def counted(method: str, *args: Any, **options: Any) -> Any:
        calls.append(method)
        return submit(method, *args, **options)

    monkeypatch.setattr(engine, "submit", counted)
    return calls


def test_groups_and_the_plan_stay_for_later_weight_syncs(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.pool._sender.close()
    calls = count_messages(group, monkeypatch)
    group.pool.load(tensors(1))
    peer = group.pool._sender._peers["gloo"]
    assert len(group.pool._sender._plan) > 2
    assert calls == ["ready", "load"]
    for version in (2, 3):
        calls.clear()
        group.pool.load(tensors(version))
        assert calls == ["ready", "load"]
        assert group.pool._sender._peers == {"gloo": peer}
        assert group.versions() == {version}
    assert group.pool.ways == ["gloo", "gloo"]


def test_other_tensors_are_announced_by_the_next_weight_sync(group: Group) -> None:
    """The first bucket is the same, and a later one is not; or the stream ends before the last bucket."""
    group.pool.load(tensors(1))
    *others, (_, last) = tensors(2)
    for wrong in ([*tensors(2, 6), ("other", torch.ones(3))], [*others, ("other", last)], [*tensors(2, 2)]):
        begun = time.monotonic()
        with pytest.raises(WeightsLostError, match="in the last weight sync"):
            group.pool.load(iter(wrong))
        assert time.monotonic() - begun < 10
        assert group.pool.current == set()
        group.pool.load(tensors(3))
        assert group.versions() == {3}
    assert group.told == []


def failing(version: int, device: str = "cpu") -> NamedTensors:
    yield from tensors(version, 7, device)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("later", [True, False])
def test_a_stream_that_fails_leaves_the_engines_refusing(group: Group, later: bool) -> None:
    """They stop waiting for the rest at once, not at the time limit of 30 s."""
    group.pool._sender.close()
    if later:
        group.pool.load(tensors(1))
    begun = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        group.pool.load(failing(2))
    assert time.monotonic() - begun < 10
    with pytest.raises(WeightsLostError):
        group.versions()
    group.pool.load(tensors(3))
    assert group.versions() == {3}
    assert group.told == []


PHASES = ["before", "first", "middle", "last", "after"]


@pytest.mark.parametrize(
    ("phase", "later"),
    [
        pytest.param(phase, later, marks=[] if (phase, later) == ("last", True) else pytest.mark.slow)
        for phase in PHASES
        for later in (True, False)
    ],
)
def test_an_engine_that_ends_in_any_phase(group: Group, phase: str, later: bool) -> None:
    """It is lost in a weight sync; the repeated one reaches the other engine, and the one after that reaches both."""
    before = len(group.told)
    group.pool._sender.close()
    if later:
        group.pool.load(tensors(1))
    if phase == "before":
        os.kill(group.pool.engines[0]._transport.pid, 9)  # type: ignore[union-attr]
    else:
        group.mark.write_text(phase)
    begun = time.monotonic()
    with pytest.raises(WeightsLostError):
        group.pool.load(tensors(2))
    assert len(group.told) == before + 1
    with pytest.raises(WeightsLostError):
        group.versions()
    group.pool.load(tensors(3))
    assert time.monotonic() - begun < 15
    assert len(group.pool.current) == 1
    assert group.versions() == {3}
    group.pool.load(tensors(4))
    assert group.pool.current == {0, 1}
    assert group.versions() == {4}
    group.told.clear()


class OnFile:
    """A file that an engine maps; in place of `OnDevice`."""

    def __init__(self, ring: Tensor) -> None:
        self._size = ring.numel()

    def open(self) -> Tensor:
        return _ring(os.environ["RING"], self._size)


def _ring(path: str, size: int) -> Tensor:
    return in_file(path, size).view(2, -1)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.gpu(2))])
def test_weight_syncs_of_gpus_break_off_and_begin_anew(number: int, tmp_path: Path) -> None:
    """In place on the GPU of the weights, and by NCCL on another one."""
    made = Group(tmp_path / "mark", [str(number)])
    for version in (1, 2):
        made.pool.load(tensors(version, device="cuda:0"))
        assert made.versions() == {version}
    assert made.pool.ways == ["nccl" if number else "in place"]
    begun = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        made.pool.load(failing(3, "cuda:0"))
    made.pool.load(tensors(4, device="cuda:0"))
    assert made.versions() == {4}
    made.mark.write_text("middle")
    with pytest.raises(WeightsLostError):
        made.pool.load(tensors(5, device="cuda:0"))
    assert time.monotonic() - begun < 20
    made.pool.load(tensors(6, device="cuda:0"))
    assert made.versions() == {6}
    made.pool.close()


def in_shared_buckets(*args: Any, **kwargs: Any) -> Iterator[Bucket]:
    """Yield what `in_buckets` yields, in the file."""
    ring = _ring(os.environ["RING"], 2 * BUCKET)
    for entries, packed, half in in_buckets(*args, **kwargs):
        ring[half] = packed[half]
        yield Bucket(entries, ring, half)


@pytest.mark.parametrize("device", ["gpu 0", pytest.param("", marks=pytest.mark.slow)])
def test_slow_engines_read_each_bucket_before_it_is_overwritten(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, where a file stands for the GPU's memory, and as bytes that are broadcast."""
    monkeypatch.setenv("RING", str(tmp_path / "ring"))
    made = Group(tmp_path / "mark", pause=0.01, device_id=device)
    if device:
        monkeypatch.setattr(sender, "device_id", lambda weights_device: device)
        monkeypatch.setattr(sender, "OnDevice", OnFile)
        monkeypatch.setattr(sender, "in_buckets", in_shared_buckets)
    for version in (1, 2):
        made.pool.load(tensors(version))
        assert made.versions() == {version}
    assert made.pool.ways == ["in place" if device else "gloo"] * 2
    made.pool.close()
