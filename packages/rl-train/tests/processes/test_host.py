"""The protocol of all processes: numbered calls, parts, bounded errors, limits, losses and replacements."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from rl_train.processes.child import Child
from rl_train.processes.errors import ProcessLost, Raised, portable
from rl_train.processes.host import Process

MODULE = """
import ctypes, os, signal, sys, time
from rl_train.processes.worker import Calls

class Foreign(Exception):
    pass

class Strange(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

class Odd:
    def __reduce__(self):
        return sys.exit, ("from unpickling",)

def start(refuses):
    if refuses:
        raise ValueError("no such thing")
    return os.getpid()

def raises(kind):
    if kind == "foreign":
        raise Foreign("the reason")
    if kind == "strange":
        raise Strange(1, 2)
    if kind == "large":
        raise ValueError("x" * 10**8)
    if kind == "exit":
        raise SystemExit("left")
    raise OSError(28, "no space")

def returns(kind):
    return {"module": sys, "parts": 3}[kind]

METHODS = {"start": start, "raises": raises, "returns": returns, "double": lambda x: 2 * x, "leave": os._exit,
           "sleep": time.sleep, "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP)}

def main(pipe):
    calls = Calls(pipe)
    if "STOPS" in os.environ:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "SIGNS" in os.environ:
        calls.send_signs()
    for call in calls:
        if call.method == "parts":
            for seconds in call.arguments():
                time.sleep(seconds)
                call.part(seconds)
            call.answer()
        else:
            call.run(METHODS[call.method])
"""


# Its process sends signs of life while this caller is stopped.
CALLER = """
import sys
from rl_train.processes.child import Child
from rl_train.processes.host import Process
launch = lambda: Child("answering:main", path=sys.path, env={"SIGNS": "1"})
process = Process("it", launch, start=(False,), silence=1.0)
process.start()
process.ready()
call = process.submit("sleep", 1.0, limit=1.5)
print("waits", flush=True)
call.result()
print("answered", flush=True)
process.close()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    (tmp_path / "answering.py").write_text(MODULE)
    with ExitStack() as stack:

        def make(refuses: bool = False, env: dict[str, str] | None = None, **limits: float) -> Process:
            launch = partial(Child, "answering:main", path=[str(tmp_path), *sys.path], env=env)
            process = stack.enter_context(closing(Process("it", launch, start=(refuses,), **limits)))
            process.start()
            return process

        yield make


def test_a_process_that_is_stopped_before_its_first_sign_is_lost(start: Callable[..., Process]) -> None:
    process = start(env={"STOPS": "1"}, start_limit=300.0, silence=0.2, first_sign=0.5)
    with pytest.raises(ProcessLost, match=r"it gave no sign of life for 0.2 s"):
        process.ready()


def test_calls_are_answered_in_parts_and_at_the_same_time(start: Callable[..., Process]) -> None:
    process = start()
    assert process.ready() != os.getpid()
    parts: list[float] = []
    calls = [process.submit("parts", 0.0, 0.1, on_part=parts.append), process.submit("double", "ab")]
    assert [call.result(20) for call in calls] == [None, "abab"]
    assert parts == [0.0, 0.1]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("foreign", RuntimeError, "answering.Foreign: the reason"),
        ("strange", ValueError, "1 and 2"),
        ("large", ValueError, r"xxx\.\.\. \(100000000 characters\)"),
        ("exit", RuntimeError, "SystemExit: left"),
        ("disk", OSError, "no space"),
    ],
)
def test_an_error_keeps_its_kind_and_is_bounded(
    start: Callable[..., Process], kind: str, error: type[Exception], text: str
) -> None:
    """An exception whose class only the other process has imported is shown by its text."""
    process = start()
    with pytest.raises(error, match=text) as raised:
        process.call("raises", kind)
    assert type(raised.value) is error
    assert len(str(raised.value)) < 100_000
    assert "answering" not in sys.modules
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert ("in it:\nTraceback" in notes) == (error is not ValueError)
    assert process.call("double", 2) == 4


def test_values_that_cannot_travel_fail_alone(start: Callable[..., Process]) -> None:
    process = start()
    with pytest.raises(TypeError, match="cannot pickle 'module' object"):
        process.call("returns", "module")
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        process.call("double", threading.Lock())
    assert process.call("double", 2) == 4


def test_a_process_that_ends_loses_its_calls_and_another_takes_its_place(start: Callable[..., Process]) -> None:
    process = start()
    first = process.ready()
    calls = [process.submit("leave", 3), process.submit("double", 1)]
    for call, method in zip(calls, ("leave", "double"), strict=True):
        with pytest.raises(ProcessLost, match=rf"^it ended its process \(exit status 3\) during {method}$") as loss:
            call.result(20)
        assert loss.value.reason == "ended its process (exit status 3)"
    with pytest.raises(ProcessLost, match="ended its process"):
        process.call("double", 1)
    process.start()
    process.start()
    assert process.ready() != first
    assert process.call("double", 1) == 2
    process.close()
    process.start()
    with pytest.raises(ProcessLost, match="it was closed during double"):
        process.call("double", 1)


def test_a_call_that_is_late_ends_the_process_and_each_answer_renews_the_limit(start: Callable[..., Process]) -> None:
    process = start()
    process.ready()
    parts: list[float] = []
    began = time.monotonic()
    with pytest.raises(ProcessLost, match=r"it took longer than 0.5 s during parts") as loss:
        process.submit("parts", 0.3, 0.3, 60, limit=0.5, on_part=parts.append).result(20)
    assert loss.value.late
    assert parts == [0.3, 0.3]
    assert 1.0 <= time.monotonic() - began < 2.5


def test_a_process_without_signs_of_life_is_lost(start: Callable[..., Process]) -> None:
    process = start(silence=1.5, env={"SIGNS": "1"})
    process.ready()
    process.call("sleep", 2.0)
    with pytest.raises(ProcessLost, match=r"it gave no sign of life for 1.5 s: its process is stopped or blocked"):
        process.call("stop")


def test_silence_counts_from_the_call_on(start: Callable[..., Process]) -> None:
    """A transport to Ray hears nothing between calls."""
    process = start(silence=1.0)
    process.ready()
    time.sleep(1.5)
    process.call("sleep", 0.5)


def test_a_caller_that_was_stopped_reads_first_what_has_arrived(tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text(MODULE)
    (tmp_path / "caller.py").write_text(CALLER)
    caller = subprocess.Popen([sys.executable, "caller.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "waits\n"
    time.sleep(0.5)  # the call is on its way
    caller.send_signal(signal.SIGSTOP)
    time.sleep(2)
    caller.send_signal(signal.SIGCONT)
    assert caller.communicate(timeout=20)[0] == "answered\n"


def test_a_start_that_fails_fails_the_calls_behind_it(start: Callable[..., Process]) -> None:
    process = start(refuses=True)
    call = process.submit("double", 1)
    with pytest.raises(ValueError, match="no such thing"):
        process.ready()
    with pytest.raises(ProcessLost, match="it did not start: no such thing during double"):
        call.result(20)


def test_close_ends_the_calls_that_run(start: Callable[..., Process]) -> None:
    process = start()
    process.ready()
    call = process.submit("sleep", 60)
    process.close()
    with pytest.raises(ProcessLost, match="it was closed during sleep"):
        call.result(20)


def test_an_error_that_cannot_be_shown_leaves_too() -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise OSError("gone")

    raised = portable(Mute())
    assert isinstance(raised, Raised)
    assert str(raised.exception()) == "<Mute, whose str raises OSError>"
