"""Engines in processes of their own: hand-over, balance, and what happens when one ends, hangs or refuses."""

from __future__ import annotations

import signal
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor
from rl_models.batch import Batch
from rl_train.rollouts import Apart, EngineOnRanks, SamplingOptions, apart
from rl_train.rollouts.handover import pack

from .stub import Fragile, Refusing, Stub

PROMPTS = [[1, number] for number in range(2, 14)]
SAMPLING = SamplingOptions(3, n=2, seed=1)


def group_of(actor: Any, model: Path, make: Any, devices: int = 2, **options: Any) -> tuple[EngineOnRanks, list[str]]:
    told: list[str] = []
    start = partial(Apart, make, [""] * devices, tell=told.append, **{"silence": 2.0, "bucket_bytes": 8192, **options})
    return EngineOnRanks(actor, model, start, bucket_bytes=8192), told


@pytest.fixture(scope="module")
def actor(model: Path) -> Actor:
    return Actor.from_pretrained(model, device="cpu")


@pytest.fixture(scope="module")
def expected(actor: Actor, model: Path) -> Batch:
    """The responses of an engine in this process, with version 1 of the weights."""
    engine = EngineOnRanks(actor, model, Stub)
    engine.update_weights(actor, 1)
    return engine.generate(PROMPTS, SAMPLING)


def same(found: Batch, expected: Batch) -> bool:
    return torch.equal(found.tokens, expected.tokens) and torch.equal(found["log_probs"], expected["log_probs"])


def test_lost_requests_are_repeated(actor: Actor, model: Path, tmp_path: Path, expected: Batch) -> None:
    """The other engine answers them; the lost one takes part again from the next update on."""
    mark = tmp_path / "mark"
    engine, told = group_of(actor, model, partial(Fragile, mark), check=True)
    losses = {signal.SIGKILL: "(exit status -9)", signal.SIGSTOP: "hangs: no sign of life for 2 s"}
    for lost, (number, said) in enumerate(losses.items()):
        engine.update_weights(actor, 1)
        assert all(one.current for one in engine._local._engines)
        assert len(told) == lost
        mark.write_text(f"begin {int(number)}")
        begun = time.monotonic()
        assert same(engine.generate(PROMPTS, SAMPLING), expected)
        assert time.monotonic() - begun < 15
        assert said in told[-1]
    engine.update_weights(actor, 2)
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert len(told) == 2
    engine.close()


def test_the_only_engine_gets_the_weights_anew(actor: Actor, model: Path, tmp_path: Path, expected: Batch) -> None:
    """It ends in the middle of a hand-over, and later while it generates."""
    mark = tmp_path / "mark"
    engine, told = group_of(actor, model, partial(Fragile, mark), devices=1)
    mark.write_text("load 9")
    engine.update_weights(actor, 1)
    assert len(told) == 1
    mark.write_text("begin 9")
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert len(told) == 2
    assert engine.version == 1
    engine.close()


class Slow(Stub):
    def begin(self, *args: Any) -> Any:
        time.sleep(1.0)
        return super().begin(*args)


@pytest.fixture(scope="module")
def one() -> Iterator[Apart]:
    """A slow engine, which stays whole."""
    found = Apart(Slow, [""], check=True, bucket_bytes=8192)
    yield found
    found.close()


def test_it_works_in_the_background(actor: Actor, model: Path, one: Apart, expected: Batch) -> None:
    engine = EngineOnRanks(actor, model, lambda: one)
    engine.update_weights(actor, 1)
    begun = time.monotonic()
    future = engine.generate_async(PROMPTS, SAMPLING)
    assert time.monotonic() - begun < 0.5
    assert same(future.result(), expected)


def test_a_refusal_and_an_update_that_succeeds(actor: Actor, model: Path, tmp_path: Path, expected: Batch) -> None:
    (tmp_path / "mark").touch()
    engine, told = group_of(actor, model, partial(Refusing, tmp_path / "mark"))
    with pytest.raises(RuntimeError, match="update to version 1 broke off: no room for the fourth tensor"):
        engine.update_weights(actor, 1)
    with pytest.raises(RuntimeError, match="does not generate"):
        engine.generate(PROMPTS, SAMPLING)
    (tmp_path / "mark").unlink()
    engine.update_weights(actor, 2)
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert not told
    engine.close()


def test_a_flipped_bit_is_seen(actor: Actor, model: Path, one: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(*args: Any, **kwargs: Any) -> Any:
        packed = pack(*args, **kwargs)
        packed[0][1].view(torch.uint8).flatten()[0] ^= 1
        return packed

    monkeypatch.setattr(apart, "pack", flip)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight arrived with other bits than were sent"):
        EngineOnRanks(actor, model, lambda: one).update_weights(actor, 1)


def test_an_engine_that_does_not_start_is_named(actor: Actor, model: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match="no engine in this place"):
        group_of(actor, model, _fail, devices=1)


def _fail() -> Stub:
    raise ValueError("no engine in this place")


def with_an_engine(group: ProcessGroup, model: Path, mark: Path) -> list[list[int]]:
    """An actor on 4 ranks; rank 0 has the engine, which ends while it generates."""
    actor = Actor.from_pretrained(model, dims=ParallelDims(dp=2, tp=2), device="cpu")
    start = partial(Apart, partial(Fragile, mark), [""], silence=20.0, tell=lambda text: None)
    engine = EngineOnRanks(actor, model, start, ranks=[0])
    engine.update_weights(actor, 1)
    found = engine.generate(PROMPTS, SAMPLING)
    engine.close()
    assert not mark.exists()
    return [found.tokens.tolist(), found["log_probs"].tolist()]


def test_all_ranks_stream_anew(ranks: RankPool, model: Path, tmp_path: Path, expected: Batch) -> None:
    mark = tmp_path / "mark"
    mark.write_text("begin 9")
    for tokens, log_probs in ranks.run(with_an_engine, model, mark):
        assert tokens == expected.tokens.tolist()
        assert log_probs == expected["log_probs"].tolist()


def test_the_extra_memory_of_a_transfer_is_a_bucket(one: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a bucket is packed, the sender holds nothing of the buckets before."""
    packed: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watching(*args: Any, **kwargs: Any) -> Any:
        alive.append(sum(reference() is not None for reference in packed))
        message = pack(*args, **kwargs)
        packed.extend(weakref.ref(tensor) for _, tensor, _ in message)
        return message

    monkeypatch.setattr(apart, "pack", watching)
    one.load((f"w{number}", torch.zeros(1 << 10)) for number in range(10))
    assert alive == [0] * 5
