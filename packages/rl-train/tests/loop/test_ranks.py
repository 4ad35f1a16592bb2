"""The arguments of a run's ranks and the imports that they ask for, without starting ranks."""

from __future__ import annotations

import datetime
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_models.api import Worker
from rl_train.cluster import launch
from rl_train.cluster.launch import Devices
from rl_train.cluster.machines import Machines
from rl_train.loop import recipe_run, run
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.score import ScoreOptions, _score_on_rank
from rl_train.options.options import TrainOptions


def checked_run(out: Path = Path("run"), **options: Any) -> CheckedRun:
    resolved = TrainOptions(model=Path("m"), prompts=Path("p"), reward="exact-match", out=out, **options)
    return CheckedRun(resolved, [], [], (), None)


class NoModelError(Exception):
    """Instead of a model."""


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (_score_on_rank, (ScoreOptions(Path("m"), device="cpu"), [[[1]]])),
        (recipe_run._on_rank, (checked_run(device="cpu"), run._on_rank)),
    ],
    ids=["score", "train"],
)
def test_ranks_use_the_device_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, function: Any, argument: tuple[Any, ...]
) -> None:
    """On a machine with CUDA, where a model that is told of no device takes CUDA."""
    devices: list[Any] = []

    def from_pretrained(kind: Any, path: Path, *, device: Any = None, **options: Any) -> Any:
        devices.append(device)
        raise NoModelError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(Worker, "from_pretrained", classmethod(from_pretrained))
    with pytest.raises(NoModelError):
        function(lambda event: None, *argument)
    assert devices == [torch.device("cpu")]


def test_only_the_first_rank_starts_the_rewards_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Rewards:
        def __init__(self, options: Any) -> None:
            said.append(f"{options.reward} starts")

        def close(self) -> None:
            said.append("ends")

    monkeypatch.setattr(run, "Rewards", Rewards)
    monkeypatch.setattr(run, "_models", lambda *_: (_ for _ in ()).throw(NoModelError))
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(NoModelError):
            recipe_run._on_rank(lambda event: None, checked_run(device="cpu"), run._on_rank)
    assert said == ["exact-match starts", "ends"]


def test_ranks_wait_for_each_other_as_long_as_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(recipe_run, "run_on_ranks", lambda *_, **options: given.update(options))
    run.train(checked_run(tmp_path, device="cpu", collective_timeout=7))
    assert given["collective_timeout"] == 7
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.update(options))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    launch._join(launch._Setup(0, 1, 0, 1, Devices.find("cpu"), Machines(), "store", 7))
    assert given["timeout"] == datetime.timedelta(seconds=7)


def test_ray_groups_have_the_timeout_and_the_dtype_of_their_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    class Placement:
        accelerator = "CPU"

        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Placement:
            return self

        def __exit__(self, *_: object) -> None: ...
        def share(self, fraction: float) -> float:
            return fraction

    class Loop:
        def run(self) -> dict[str, float]:
            return {}

    monkeypatch.setattr("rl_train.cluster.placement.Placement", Placement)
    monkeypatch.setattr("rl_train.cluster.group.RayModelGroup", lambda *_, **o: given.update(o) or nullcontext())
    monkeypatch.setattr(run, "Loop", lambda *_, **how: Loop())
    monkeypatch.setattr(run, "with_dtype", lambda engine, *_: replace(engine, dtype=torch.float32))
    run.train(checked_run(tmp_path, ray=True, collective_timeout=7))
    assert given["collective_timeout"] == 7
    assert given["dtype"] is torch.float32
