"""When gloo's threads count as idle. The tests write what the system says of the threads to files."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_layers.distributed import gloo


def write(tasks: Path, name: str, thread: str, state: str, slept: int) -> None:
    (tasks / name).mkdir(exist_ok=True)
    (tasks / name / "comm").write_text(f"{thread}\n")
    (tasks / name / "status").write_text(
        f"Name:\t{thread}\nState:\t{state}\nvoluntary_ctxt_switches:\t{slept}\nnonvoluntary_ctxt_switches:\t0\n"
    )


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process of one thread that is not gloo's."""
    monkeypatch.setattr(gloo, "_TASKS", tmp_path)
    write(tmp_path, str(threading.get_native_id()), "python", "R (running)", 7)
    return tmp_path


def looks_until_rest(monkeypatch: pytest.MonkeyPatch, meanwhile: Iterator[None]) -> int:
    """How often was looked; `meanwhile` goes one step on between two looks."""
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        next(meanwhile, None)

    monkeypatch.setattr("time.sleep", sleep)
    gloo.wait_for_gloo()
    return len(slept)


def test_without_gloo_nothing_is_waited_for(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks_until_rest(monkeypatch, iter(())) == 0


def test_threads_that_sleep_on_are_at_rest(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the connections wakes up for itself, which is no work."""
    write(tasks, "2", "pt_gloo_runloop", "S (sleeping)", 3)

    def meanwhile() -> Iterator[None]:
        for slept in range(1000):
            write(tasks, "3", "gloo_tcp_loop", "S (sleeping)", slept)
            yield

    write(tasks, "3", "gloo_tcp_loop", "S (sleeping)", 0)
    assert looks_until_rest(monkeypatch, meanwhile()) == gloo._LOOKS


@pytest.mark.parametrize("state", ["R (running)", "D (disk sleep)", "S (sleeping)"])
def test_a_thread_at_work_is_waited_for(tasks: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Also one that each look finds asleep: it was awake in between, and found the interpreter's lock taken."""

    def meanwhile() -> Iterator[None]:
        for slept in range(20):
            write(tasks, "2", "pt_gloo_runloop", state, slept)
            yield
        write(tasks, "2", "pt_gloo_runloop", "S (sleeping)", 20)

    write(tasks, "2", "pt_gloo_runloop", state, 0)
    assert looks_until_rest(monkeypatch, meanwhile()) == 21 + gloo._LOOKS


def test_a_thread_just_made_is_waited_for(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It bears the name of the one that made it until it runs; others that sleep under that name are not gloo's."""

    def meanwhile() -> Iterator[None]:
        for _ in range(20):
            yield
        write(tasks, "2", "pt_gloo_runloop", "S (sleeping)", 1)

    write(tasks, "2", "python", "R (running)", 0)
    write(tasks, "3", "python", "S (sleeping)", 1)
    assert looks_until_rest(monkeypatch, meanwhile()) == 21 + gloo._LOOKS


def test_the_wait_ends(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tasks, "2", "pt_gloo_runloop", "R (running)", 3)
    assert looks_until_rest(monkeypatch, iter(())) == gloo._MOST_LOOKS


IMPORT_ALONE = """
import atexit, torch, torch.distributed
operator = "_c10d_functional::all_gather_into_tensor"
registered = []
register, atexit.register = atexit.register, lambda function, *args: registered.append(function) or function
before = torch._C._dispatch_dump(operator)
import parallel_layers, parallel_layers.inference, parallel_layers.moe
from parallel_layers.distributed import gloo
assert torch._C._dispatch_dump(operator) == before
assert gloo.wait_for_gloo not in registered
gloo.prepare_gloo()
assert torch._C._dispatch_dump(operator) != before
"""


def test_importing_the_package_changes_nothing_in_the_process() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_ALONE], check=True, timeout=120)
