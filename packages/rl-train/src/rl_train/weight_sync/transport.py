"""The transport of weights between processes: a process group for one weight sync, or CUDA IPC on one device.

`Peer` builds the process group; the default group of an actor's or an engine's ranks stays untouched. The sender is
rank 0. The backend is NCCL where each peer has a separate GPU, gloo elsewhere.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from parallel_layers.distributed import prepare_gloo
from rl_train.weight_sync.buckets import BucketEntry

LOOPBACK = "127.0.0.1"


class Rendezvous(NamedTuple):
    """The address and the port where the peers of a group meet, the rank of one peer, and the number of peers.

    `seconds` is the time limit of the rendezvous and of each bucket.
    """

    backend: str
    address: str
    port: int
    rank: int
    size: int
    seconds: float


class BucketMessage(NamedTuple):
    """The message that describes a bucket to an engine.

    `source` says where the bytes are: in the group of a rendezvous, or in the sender's tensor on the engine's device.
    """

    entries: list[BucketEntry]
    num_bytes: int
    source: Rendezvous | Tensor | OnDevice


class BucketMissed(RuntimeError):
    """The bytes of a bucket did not arrive: a peer did not join, ended or was too slow."""


class OnDevice:
    """Pickles as the handle of a CUDA tensor; unpickled, it is the tensor itself, on the engine's only device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        rebuild, arguments = reduce_tensor(self._tensor)
        # Replace the device's index: the sender may see more devices than the engine.
        return rebuild, (*arguments[:6], 0, *arguments[7:])


class Peer:
    """A process in the group of a weight sync.

    Args:
        rendezvous: The rendezvous.
        address: The address where the other peers reach this process.
        listener: The socket of the rendezvous's port, on rank 0.
    """

    def __init__(self, rendezvous: Rendezvous, address: str, listener: socket.socket | None = None) -> None:
        self._rendezvous, self._address, self._listener = rendezvous, address, listener
        self._group: Any = None

    def join(self) -> None:
        """Join the other peers, within the time limit of the rendezvous."""
        backend, address, port, rank, size, seconds = self._rendezvous
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=self._listener is not None,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=None if self._listener is None else self._listener.detach(),
        )
        if backend == "nccl":
            # NCCL's default time limit: its watchdog ends the process there, and `broadcast` has a shorter limit.
            self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            prepare_gloo()
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, data: Tensor, broken: Callable[[], bool] = lambda: False) -> None:
        """Send the bytes of rank 0 to all peers within the time limit; the first call joins the other peers.

        Raises:
            BucketMissed: A peer did not join, ended or was too slow, or `broken` returned True.
        """
        try:
            if self._group is None:
                self.join()
            work = self._group.broadcast(data, 0)
            deadline = time.monotonic() + self._rendezvous.seconds
            while not work.is_completed():
                if broken() or time.monotonic() > deadline:
                    raise RuntimeError(f"not within {self._rendezvous.seconds:g} s")
                time.sleep(1e-4)
            work.wait()
        except RuntimeError as error:
            raise BucketMissed(f"a bucket did not reach all engines: {error}") from error

    def receive(self, num_bytes: int) -> Tensor:
        """Return the bytes that rank 0 broadcasts, as a tensor of uint8; see `broadcast`."""
        device = "cuda" if self._rendezvous.backend == "nccl" else "cpu"
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.broadcast(data)
        return data

    def close(self) -> None:
        """Leave the group, also in the middle of an operation. Safe to call twice."""
        if self._group is not None and self._rendezvous.backend == "nccl":
            self._group.abort()
        self._group = None
        if self._listener is not None:
            self._listener.close()


def device_id(device: torch.device | None = None) -> str:
    """Return an id of a GPU (default: the first that this process sees), equal in all processes; empty for a CPU."""
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
