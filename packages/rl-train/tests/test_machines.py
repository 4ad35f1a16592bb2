"""The machines of a run under torchrun tell each other of errors, and agree on the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch.distributed as dist

from rl_train.cluster import machines as module
from rl_train.cluster.machines import Failure, Machines
from rl_train.processes.errors import RankFailed


@pytest.fixture
def pair() -> Iterator[list[Machines]]:
    """Two commands at one store, as torchrun's first agent has it."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield [Machines(rank, 2, port=store.port) for rank in range(2)]
    del store


def together(*functions: Callable[[], Any]) -> list[BaseException | None]:
    """Call functions at the same time, and return their errors."""
    errors: list[BaseException | None] = [None] * len(functions)

    def call(number: int) -> None:
        try:
            functions[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_the_variables_of_torchrun_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert Machines.here() == Machines()
    variables = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in (variables | {"MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, str(value))
    machines = Machines.here()
    assert machines == Machines(3, 4, 1, 2, "10.0.0.1", 29500)
    assert not machines.first
    assert machines.ranks(8) == 2
    with pytest.raises(ValueError, match="6 ranks do not divide into 4 equal parts"):
        machines.ranks(6)


def test_machines_agree_on_the_run_and_its_folder(pair: list[Machines], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("process 7 of here")
    assert together(*(lambda each=each: each.agree({"seed": (1,)}, mark, 30) for each in pair)) == [None, None]


def test_a_machine_with_other_options_is_refused_and_the_others_do_not_wait(
    pair: list[Machines], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    mark.write_text("process 7 of here")

    def agree(each: Machines, seed: int) -> None:
        with each.failures_told():
            each.agree({"seed": seed, "steps": 3}, mark, 30)

    first, second = together(lambda: agree(pair[0], 1), lambda: agree(pair[1], 2))
    assert isinstance(second, ValueError)
    assert str(second).startswith("differs from the first machine: seed=2 here and 1 there;")
    assert isinstance(first, RankFailed)
    assert first.mistake is not None
    assert "machine 1 (" in first.mistake
    assert "seed=2 here and 1 there" in first.mistake


def test_a_folder_that_is_not_shared_is_refused(
    pair: list[Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SEEN_SECONDS", 0.0)
    marks = [tmp_path / name / "mark" for name in "ab"]
    for number, mark in enumerate(marks):
        mark.parent.mkdir()
        mark.write_text(f"process {number}")

    def agree(number: int) -> None:
        with pair[number].failures_told():
            pair[number].agree({}, marks[number], 30)

    first, second = together(lambda: agree(0), lambda: agree(1))
    assert isinstance(second, ValueError)
    assert f"{marks[1].parent} is another folder than on the first machine" in str(second)
    assert isinstance(first, RankFailed)


def test_a_machine_that_does_not_come_is_missed(pair: list[Machines], tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("x")
    with pytest.raises(RankFailed, match="not all of the 2 commands of torchrun have come within 0 s"):
        pair[0].agree({}, tmp_path / "mark", 0)


def watched(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    failures: Queue[Failure] = Queue()
    return failures, machines.watched(failures.put)


def test_the_error_of_another_machine_reaches_the_ranks(pair: list[Machines], monkeypatch: pytest.MonkeyPatch) -> None:
    failures, watch = watched(pair[0], monkeypatch)
    with watch as name:
        assert name == "ranks 1"
        with pytest.raises(ZeroDivisionError), pair[1].failures_told():
            raise ZeroDivisionError("the reason")
        failure = failures.get(timeout=10)
    assert failure.text.startswith("machine 1 (")
    assert failure.text.endswith("): the reason")
    assert not failure.mistake


def test_a_silent_machine_is_lost_and_one_that_has_ended_is_not(
    pair: list[Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENCE", 0.5)
    failures, watch = watched(pair[0], monkeypatch)
    with watch:
        assert failures.get(timeout=10) == Failure("machine 1 gave no sign of life for 0.5 s", False)
    failures, watch = watched(pair[0], monkeypatch)
    with pair[1].watched(lambda failure: None):  # its first run
        pass
    with pair[1].watched(lambda failure: None):
        pass
    with watch:
        time.sleep(0.8)
    assert failures.empty()


def test_torchrun_that_ends_on_the_first_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    failures, watch = watched(Machines(1, 2, port=store.port), monkeypatch)
    with watch:
        time.sleep(0.1)
        del store
        assert "torchrun on the first machine, 127.0.0.1:" in failures.get(timeout=10).text
