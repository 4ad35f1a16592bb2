"""Make gloo safe in this process: its all-gathers do not corrupt memory, and its threads rest before Python ends.

The two threads of a gloo group (as of torch 2.13) write the name of their last collective into one std::string without
a lock. Two writes of a name of more than 15 characters at once free its memory twice. torch's functional all-gather has
such a name (ALLGATHER_COALESCED); its variant with an `out` (ALLGATHER) and all others have short names.

A gloo thread releases a collective's tensors a moment after `wait` returns, and takes the interpreter's lock for it.
Before Python 3.14 the process aborts if the interpreter exits meanwhile ("terminate called without an active
exception"), and torchrun stops the other ranks. `destroy_process_group` does not help while a model holds its groups.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TASKS = Path("/proc/self/task")
_LOOKS = 4
_MOST_LOOKS = 1000


@functools.cache
def prepare_gloo() -> torch.library.Library:
    """Replace the all-gather, also for DTensor and FSDP2, and wait for gloo's threads at exit (on Linux).

    Called where a CPU grid is built and where a collective of CPU tensors starts, not at import; later calls do
    nothing. The cached library keeps the operator registered.
    """
    if sys.platform == "linux" and sys.version_info < (3, 14):
        atexit.register(wait_for_gloo)
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    return library


def _all_gather_into_tensor(x: Tensor, group_size: int, group_name: Any) -> Tensor:
    out = x.new_empty(group_size * x.shape[0], *x.shape[1:])
    # The variant with an `out` takes complex tensors only as pairs of real numbers.
    pair = torch.view_as_real if x.is_complex() else torch.Tensor.detach
    torch.ops._c10d_functional.all_gather_into_tensor_out(pair(x), group_size, group_name, out=pair(out))
    return out


def wait_for_gloo() -> None:
    """Return when gloo's threads are idle, or after 1000 checks: other ranks may be waiting for this process."""
    looks_at_rest = 0
    last_threads: dict[str, str] | None = None
    for _ in range(_MOST_LOOKS):
        threads = _threads()
        if threads == {}:
            return
        # Several idle checks in a row: a thread that just woke up may sleep because the check itself holds the lock.
        looks_at_rest = looks_at_rest + 1 if threads is not None and threads == last_threads else 0
        if looks_at_rest == _LOOKS:
            return
        last_threads = threads
        time.sleep(0.002)  # releases the lock to threads that wait for it


def _threads() -> dict[str, str] | None:
    """Return how often each gloo thread of this process has gone to sleep, or None while one is awake.

    Only "runloop" threads hold tensors. Other threads look after connections and wake up every 10 ms, so their counts
    are left out. A new thread has the name of this thread until it runs, so an awake thread of that name may be gloo's.
    See proc_pid_status(5).
    """
    threads, thread_id = {}, str(threading.get_native_id())
    unnamed = (_TASKS / thread_id / "comm").read_text().rstrip("\n")
    for task in _TASKS.iterdir():
        if task.name == thread_id:
            continue
        try:
            status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except OSError:
            continue  # the thread has ended
        asleep, name = status["State"].startswith("S"), status["Name"]
        if not asleep and ("gloo" in name or name == unnamed):
            return None
        if "gloo" in name:
            threads[task.name] = status["voluntary_ctxt_switches"] if "runloop" in name else ""
    return threads
