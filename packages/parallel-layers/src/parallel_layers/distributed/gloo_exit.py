"""At the end of a process, wait until gloo's threads have nothing left to do (Linux).

A thread of gloo lets go of a collective's tensors a moment after those who wait for the result go on. A tensor that
Python has seen needs the interpreter's lock for that, and before Python 3.14 a thread that asks for the lock while the
interpreter ends is unwound, through functions of gloo that must not be: "terminate called without an active exception".
The rank's work is done by then, but torchrun takes it for a failure and stops the ranks that are still at work.
`destroy_process_group` joins the threads of the groups that nothing holds any more; a model holds its groups.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_SECONDS_BETWEEN = 0.002
_LOOKS = 4
_MOST_LOOKS = 1000


def wait_for_gloo() -> None:
    """Return once gloo's threads rest, and after a thousand looks in any case: others may be waiting for this rank."""
    looks_at_rest = 0
    before: dict[str, str] | None = None
    for _ in range(_MOST_LOOKS):
        threads = _threads()
        if threads == {}:
            return
        # Several in a row: a thread just woken may have found the lock taken by the look itself, and sleep again.
        looks_at_rest = looks_at_rest + 1 if threads is not None and threads == before else 0
        if looks_at_rest == _LOOKS:
            return
        before = threads
        time.sleep(_SECONDS_BETWEEN)  # without the lock, so that a thread that waits for it runs


def _threads() -> dict[str, str] | None:
    """How often each of gloo's threads in this process has gone to sleep; None when one is awake (proc_pid_status(5)).

    One that looks after connections wakes up every 10 ms, and has no tensors: it counts as one that never did. One that
    was just made bears the name of this thread until it runs: awake under that name, it may be gloo's.
    """
    threads, this = {}, str(threading.get_native_id())
    unnamed = (_TASKS / this / "comm").read_text().rstrip("\n")
    for task in _TASKS.iterdir():
        if task.name == this:
            continue
        try:
            status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except OSError:
            continue  # it ended meanwhile
        asleep, name = status["State"].startswith("S"), status["Name"]
        if not asleep and ("gloo" in name or name == unnamed):
            return None
        if "gloo" in name:
            threads[task.name] = status["voluntary_ctxt_switches"] if "runloop" in name else ""
    return threads


@functools.cache
def install() -> None:
    """Have Python call `wait_for_gloo` when the process ends, once."""
    if sys.platform == "linux" and sys.version_info < (3, 14):
        atexit.register(wait_for_gloo)
