"""`EngineProcess`: an engine in a process of this machine, on a device of its own; a pipe carries the messages."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rl_train.rollouts.handover import Packed
from rl_train.rollouts.interface import LocalEngine
from rl_train.rollouts.remote import LIFE_SECONDS, Answer, EngineLostError, RemoteEngine, serve


def processes(
    make: Callable[[], LocalEngine],
    devices: Sequence[str],
    *,
    sender: str | None = None,
    silence: float = 60.0,
    timeout: float = 1800.0,
) -> list[EngineProcess]:
    """Return engines for `Apart`, each in a process of this machine; `Apart` starts the processes.

    Args:
        make: Makes the engine in its process; pickled, so a function of a module or a `partial` of it.
        devices: `CUDA_VISIBLE_DEVICES` of each engine; one process each.
        sender: The device of the weights, as in `devices`. An engine alone on this device reads CUDA tensors in place.
        silence, timeout: See `RemoteEngine`.
    """
    in_place = list(devices) == [sender]
    return [
        EngineProcess(f"engine {number} (device {device or 'cpu'})", make, device, in_place, silence, timeout)
        for number, device in enumerate(devices)
    ]


class EngineProcess(RemoteEngine):
    """An engine in a process of this machine; see `processes`."""

    def __init__(
        self, name: str, make: Callable[[], LocalEngine], device: str, in_place: bool, silence: float, timeout: float
    ) -> None:
        super().__init__(name, silence, timeout)
        self._make, self._device, self._in_place = make, device, in_place
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See `RemoteEngine`."""
        super().start()
        self._pipe, theirs = Pipe()
        env = os.environ | {"CUDA_VISIBLE_DEVICES": self._device, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = f"from rl_train.rollouts.process import main; main({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], env=env)
        # Close our copy of the end of the process, so that end-of-file reveals its death.
        theirs.close()
        # The key opens shared tensors.
        self._send(bytes(multiprocessing.current_process().authkey), self._make)

    def end(self) -> None:
        """See `RemoteEngine`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._pipe.close()

    def share(self, bucket: list[Packed]) -> Any:
        """See `RemoteEngine`; the processes share the memory, of the device (CUDA IPC) or of the host."""
        if self._in_place and all(tensor.is_cuda for _, tensor, _ in bucket):
            torch.cuda.ipc_collect()  # frees what the engine has read
            return [(name, _OnDevice(tensor), checksum) for name, tensor, checksum in bucket]
        return [(name, tensor.to("cpu", copy=True).share_memory_(), checksum) for name, tensor, checksum in bucket]

    def call(self, method: str, *args: Any) -> Any:
        """See `RemoteEngine`; calls of several threads wait for each other."""
        with self._lock:
            return super().call(method, *args)

    def _ask(self, method: str, args: Sequence[Any]) -> None:
        # In a thread: a process that hangs may leave the pipe full.
        threading.Thread(target=self._send, args=(method, args), daemon=True).start()

    def _listen(self, asked: None, method: str) -> list[Answer | None]:
        try:
            return [self._pipe.recv()] if self._pipe.poll(LIFE_SECONDS) else []
        except (EOFError, OSError):
            assert self.process is not None
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            status = self.process.poll()
            raise EngineLostError(f"{self.name} ended during {method} (exit status {status})") from None

    def _send(self, *message: Any) -> None:
        with suppress(OSError, ValueError):  # the process has ended; who waits for the answer sees that
            self._pipe.send(message)


class _OnDevice:
    """Pickles as the handle of a CUDA tensor; unpickled, it is the tensor itself, on the engine's only device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        rebuild, arguments = reduce_tensor(self._tensor)
        # The number of the device; this process may see more devices than the engine.
        return rebuild, (*arguments[:6], 0, *arguments[7:])


def main(pipe_end: int) -> None:
    """Hold an engine and answer calls until the other end is closed; the main function of the process."""
    pipe: Connection[Any, Any] = Connection(pipe_end)
    one_at_a_time = threading.Lock()

    def send(message: Any) -> None:
        with one_at_a_time:
            pipe.send(message)

    def live() -> None:
        with suppress(OSError):
            while True:
                send(None)
                time.sleep(LIFE_SECONDS)

    threading.Thread(target=live, daemon=True).start()
    multiprocessing.current_process().authkey, make = pipe.recv()
    serve(make, pipe.recv, send)
