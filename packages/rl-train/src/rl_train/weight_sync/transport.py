"""The transport of weights between processes: process groups of a sender and its engines, and CUDA IPC on one device.

`Peer` is a process in such a group; the default group of an actor's or an engine's ranks stays untouched. The sender is
rank 0. The backend is NCCL where each peer has a separate GPU, gloo elsewhere.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from parallel_layers.device import GPU, gpu
from parallel_layers.distributed import prepare_gloo

LOOPBACK = "127.0.0.1"
# Seconds between two looks at an operation, and looks between two questions whether a peer has left.
_LOOK_SECONDS, _LOOKS = 5e-5, 200
Broken = Callable[[], bool]


class Rendezvous(NamedTuple):
    """The address and the port where the peers of a group meet, the rank of one peer, and the number of peers.

    `seconds` is the time limit of the rendezvous and of each bucket; `key` names the group.
    """

    backend: str
    address: str
    port: int
    rank: int
    size: int
    seconds: float
    key: str


class WeightMessage(NamedTuple):
    """The message that announces a weight sync to a receiver; an engine gets a list of them, one for each receiver.

    Attributes:
        rendezvous: The group of the receiver.
        ring: The sender's ring, where the receiver reads buckets in place; None if the group broadcasts them.
        plan: The name under which the sender publishes each bucket's contents; empty: those of the last weight sync.
        shards: Whether the ranks of the actor send boxes of shards (`ShardSender`), instead of whole tensors.
    """

    rendezvous: Rendezvous
    ring: OnDevice | None
    plan: str
    shards: bool = False


class BucketMissed(RuntimeError):
    """The bytes of a bucket did not arrive: a peer did not join, ended or was too slow."""


class OnDevice:
    """The handle of a CUDA tensor, which another process opens once."""

    def __init__(self, tensor: Tensor) -> None:
        self._rebuild, self._arguments = reduce_tensor(tensor)

    def open(self) -> Tensor:
        """Return the tensor; this process may know its GPU, the current one, by another index than the sender."""
        arguments = self._arguments
        tensor: Tensor = self._rebuild(*arguments[:6], gpu.current_device(), *arguments[7:])
        return tensor


class Peer:
    """A process in the group of a sender and its engines; the first operation joins the other peers.

    An operation ends early where `broken` returns True or a peer has left. `listener` is the socket of the rendezvous's
    port, on rank 0.

    Raises:
        BucketMissed: The sender has left; and each operation, where a peer did not join, ended or was too slow.
    """

    def __init__(self, rendezvous: Rendezvous, listener: socket.socket | None = None) -> None:
        self.rendezvous, self._address = rendezvous, rendezvous.address
        self._group: Any = None
        with _missed():
            if listener is None:  # a store tries again until the time limit where the sender has left
                with socket.create_connection(rendezvous[1:3], rendezvous.seconds) as connection:
                    self._address = connection.getsockname()[0]  # where the other peers reach this process
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                rendezvous.address,
                rendezvous.port,
                is_master=listener is not None,
                timeout=timedelta(seconds=rendezvous.seconds),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )

    def broadcast(self, data: Tensor, broken: Broken = lambda: False) -> Any:
        """Begin to send the bytes of rank 0 to all peers; see `wait`."""
        with _missed():
            return self._joined(broken).broadcast(data, 0)

    def exchange(
        self, data: Tensor, sizes: list[int], into: Tensor, into_sizes: list[int], broken: Broken = lambda: False
    ) -> Any:
        """Begin to send the bytes `data` and to receive `into`, with sizes for each peer; see `wait`."""
        with _missed():
            return self._joined(broken).alltoall_base(into, data, into_sizes, sizes)

    def meet(self, broken: Broken = lambda: False) -> Any:
        """Begin to wait for all peers; see `wait`."""
        with _missed():
            return self._joined(broken).barrier()

    def wait(self, work: Any, broken: Broken = lambda: False) -> None:
        """Wait for an operation within the time limit."""
        with _missed():
            self._look(work.is_completed, broken)
            work.wait()

    def publish(self, name: str, plan: Any) -> None:
        """Tell the other peers what they will receive, such as the contents of a bucket."""
        with _missed():
            self._store.set(name, pickle.dumps(plan))

    def published(self, name: str) -> Any:
        """Wait for what another peer publishes within the time limit, and return it."""
        with _missed():
            self._look(lambda: self._store.check([name]), lambda: False)
            return pickle.loads(self._store.get(name))

    def close(self) -> None:
        """Leave the group, also in the middle of an operation. Safe to call twice."""
        if self._store is not None:
            with suppress(RuntimeError):  # the sender's store is gone
                self._store.set("left", "")  # NCCL's operations of the other peers would wait
        if self._group is not None and self.rendezvous.backend == "nccl":
            self._group.abort()
        self._group = self._store = None

    def _look(self, done: Callable[[], bool], broken: Broken) -> None:
        deadline, looks = time.monotonic() + self.rendezvous.seconds, 0
        while not done():
            looks += 1
            if looks % _LOOKS == 0 and self._store.check(["left"]):
                raise RuntimeError("a peer has left")
            if broken() or time.monotonic() > deadline:
                raise RuntimeError(f"not within {self.rendezvous.seconds:g} s")
            time.sleep(_LOOK_SECONDS)

    def _joined(self, broken: Broken) -> Any:
        """Return the group; the first call joins the other peers."""
        if self._group is not None:
            return self._group
        backend, _, _, rank, size, seconds, _ = self.rendezvous
        limit = timedelta(seconds=seconds)
        # A peer that ended before it came would be waited for until the time limit.
        self._store.set(f"{rank} came", "")
        self._look(lambda: self._store.check([f"{peer} came" for peer in range(size)]), broken)
        if backend == "nccl":
            # NCCL's default time limit: its watchdog ends the process there, and `wait` has a shorter limit.
            self._group = dist.ProcessGroupNCCL(self._store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            prepare_gloo()
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            self._group = dist.ProcessGroupGloo(self._store, rank, size, options)
        return self._group


@contextmanager
def _missed() -> Iterator[None]:
    """Raise BucketMissed for an error of an operation."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        clear_frames(error.__traceback__)  # they keep operations, and these the group
        raise BucketMissed(f"a bucket did not reach all engines: {error}") from error


def device_id(device: torch.device | None = None) -> str:
    """Return an id of a GPU (default: the first that this process sees), equal in all processes; empty for a CPU."""
    if device is None:
        device = torch.device(GPU, 0) if gpu.is_available() else torch.device("cpu")
    return str(gpu.get_device_properties(device).uuid) if device.type == GPU else ""
