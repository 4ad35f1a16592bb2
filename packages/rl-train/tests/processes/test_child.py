"""Processes at the other end of a pipe: nothing waits for one that is stopped, and none outlives its owner."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rl_train.processes.child import Child

from .living import lives, wait_until

MODULE = """
import os, signal, struct, subprocess, sys, time

def family(pipe):
    then = pipe.recv()
    # A child in a session of its own, and a grandchild whose parent has ended.
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleeps, start_new_session=True)
    program = f"import subprocess; print(subprocess.Popen({sleeps!r}, start_new_session=True, stdout=-3).pid)"
    grandchild = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE).stdout)
    pipe.send([os.getpid(), child.pid, grandchild])
    if then == "exit":
        os._exit(3)
    if then == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)

def half_a_message(pipe):
    os.write(pipe.fileno(), struct.pack("!i", 1000) + b"half")
    os.kill(os.getpid(), signal.SIGSTOP)

def echo(pipe):
    pipe.send(sys.stdin.read())
    while True:
        pipe.send(pipe.recv())

def forks(pipe):
    os.fork()  # holds the pipe, too
    time.sleep(600)
"""
OWNER = """
import sys, time
from rl_train.processes.child import Child
child = Child("work:family", path=sys.path)
child.send("sleep")
print(*child.receive(20), child.pid, flush=True)
time.sleep(600)
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="tells by /proc which processes live")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    (tmp_path / "work.py").write_text(MODULE)
    with ExitStack() as stack:

        def make(function: str, *messages: Any) -> Child:
            child = Child(f"work:{function}", path=[str(tmp_path), *sys.path])
            stack.callback(child.end)
            for message in messages:
                child.send(message)
            return child

        yield make


def test_messages_of_any_length_come_back_and_standard_input_is_empty(start: Callable[..., Child]) -> None:
    child = start("echo", {"first": 1})
    assert child.receive(20) == ""
    assert child.receive(20) == {"first": 1}
    for message in ("short", "long" * 10**6):
        child.send(message)
    assert child.receive(20) == "short"
    assert child.receive(20) == "long" * 10**6
    with pytest.raises(TimeoutError):
        child.receive(0.01)
    child.end()
    for _ in range(2):
        with pytest.raises(EOFError):
            child.receive(20)
    child.send("into the void")
    child.end()


@needs_proc
@pytest.mark.parametrize("then", ["exit", "stop", "sleep"])
def test_what_a_process_has_started_ends_with_it(start: Callable[..., Child], then: str) -> None:
    child = start("family", then)
    family = child.receive(20)
    if then == "exit":
        with pytest.raises(EOFError):
            child.receive(20)
        assert child.status() == "(exit status 3)"
    else:
        assert all(map(lives, family))
        began = time.monotonic()
        child.end()
        assert time.monotonic() - began < 2
        assert child.status() == "(exit status -9)"
    assert not any(map(lives, family))


@needs_proc
@pytest.mark.parametrize("killed", ["owner", "guard"])
def test_a_process_ends_with_its_owner_and_with_its_guard(
    start: Callable[..., Child], tmp_path: Path, killed: str
) -> None:
    (tmp_path / "work.py").write_text(MODULE)
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    *family, guard = map(int, owner.stdout.readline().split())
    assert all(map(lives, [*family, guard]))
    if killed == "guard":
        subprocess.run(["kill", "-9", str(guard)], check=True)
        wait_until(lambda: not lives(family[0]))
        for orphan in family[1:]:
            subprocess.run(["kill", "-9", str(orphan)], check=True)
    owner.kill()
    owner.communicate()
    wait_until(lambda: not any(map(lives, [*family, guard])))


@pytest.mark.parametrize("function", ["half_a_message", "forks"])
def test_nothing_waits_for_a_process_that_is_stopped_in_a_message_or_whose_fork_has_the_pipe(
    start: Callable[..., Child], function: str
) -> None:
    child = start(function)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        child.receive(0.5)
    child.send("x" * 10**7)  # more than a pipe holds
    child.end()
    with pytest.raises(EOFError):
        child.receive(20)
    assert time.monotonic() - began < 5


ENGINE_OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from rl_train.engines.process import processes

class Parent:
    def sleep(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path("pids").write_text(f"{os.getpid()} {child.pid} ")
        time.sleep(600)

if __name__ == "__main__":
    from owner import Parent
    (engine,) = processes(Parent, [""])
    engine.start()
    engine.ready()
    engine.call("sleep")
"""


@pytest.mark.slow
@needs_proc
def test_an_engine_and_its_children_end_with_a_caller_that_is_killed_in_the_middle_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "owner.py").write_text(ENGINE_OWNER)
    owner = subprocess.Popen([sys.executable, "owner.py"], cwd=tmp_path)
    pids = tmp_path / "pids"
    wait_until(lambda: pids.is_file() and pids.read_text().endswith(" "))
    engine, child = map(int, pids.read_text().split())
    assert lives(engine)
    assert lives(child)
    owner.kill()
    owner.wait()
    wait_until(lambda: not lives(engine) and not lives(child), 10)
