"""`prepare`: the server that forks all ranks imports what they need. This file imports no torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from parallel_layers.device import ASKS_NVML

# torch imports it at the first operator written in Python, or the first optimizer. It brings FSDP.
_SLOW = "torch._dynamo"


def prepare(*modules: str) -> None:
    """Start the server that forks all ranks; it imports these modules in the background. A second call does nothing.

    A command calls it first: the server imports for seconds, and the command meanwhile checks the run. The server
    starts no threads and touches no device, so forking it is safe.
    """
    forkserver.set_forkserver_preload([*modules, _SLOW])
    resource_tracker.ensure_running()  # else the server starts it, and unblocks Ctrl-C
    # Modules such as transformers ask for GPUs at import, and a process that has initialised them cannot be forked into
    # ranks that use them.
    before = os.environ.get(ASKS_NVML)
    os.environ[ASKS_NVML] = "1"
    try:
        with _interrupts_blocked():
            forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[ASKS_NVML]
        else:
            os.environ[ASKS_NVML] = before


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in the processes that start inside, until they unblock it; this process gets it afterwards.

    A terminal sends Ctrl-C to all processes of a command. A process that is importing would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
