"""At the end of a process, wait until gloo's threads have nothing left to do (Linux).

A thread of gloo lets go of a collective's tensors a moment after those who wait for the result go on. A tensor that
Python has seen needs the interpreter's lock for that, and before Python 3.14 a thread that asks for the lock while the
interpreter ends is unwound, through functions of gloo that must not be: "terminate called without an active exception".
The rank's work is done by then, but torchrun takes it for a failure and stops the ranks that are still at work.
`destroy_process_group` joins the threads of the groups that nothing holds any more; a model holds its groups.
"""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_SECONDS_BETWEEN = 0.002
_LOOKS = 3
_MOST_LOOKS = 1000


def wait_for_gloo() -> None:
    """Return once gloo's threads rest, and after a thousand looks in any case: others may be waiting for this rank."""
    looks_at_rest = 0
    for _ in range(_MOST_LOOKS):
        states = _states()
        if not states:
            return
        # Several in a row: a thread just woken may have found the lock taken by the look itself, and sleep again.
        looks_at_rest = 0 if "R" in states else looks_at_rest + 1
        if looks_at_rest == _LOOKS:
            return
        time.sleep(_SECONDS_BETWEEN)  # without the lock, so that a thread that waits for it runs


def _states() -> list[str]:
    """One letter for each of gloo's threads in this process: R runs or could run, S sleeps (proc_pid_stat(5))."""
    states = []
    for task in _TASKS.iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        name, _, fields = stat.rpartition(")")
        if "gloo" in name:
            states.append(fields.split()[0])
    return states


if sys.platform == "linux" and sys.version_info < (3, 14):
    atexit.register(wait_for_gloo)
