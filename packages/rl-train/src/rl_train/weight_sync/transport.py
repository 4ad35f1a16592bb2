"""The transport of weights between processes: a process group made for one hand-over, or CUDA IPC on one device.

The sender is rank 0 of the group, which `Member` builds by hand: the default group, which the ranks of an actor or of
an engine may have, has no part in it. The group is gloo's on CPUs, and NCCL's where each member has a GPU of its own.
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
from rl_train.weight_sync.buckets import Bucket, Entry

LOOPBACK = "127.0.0.1"


class Meeting(NamedTuple):
    """The address and the port where the members of a group meet, the rank of a member, and the number of members.

    `seconds` is the time limit of the meeting, and of each bucket.
    """

    backend: str
    address: str
    port: int
    rank: int
    size: int
    seconds: float


class Parcel(NamedTuple):
    """The description of a bucket, which an engine gets first. A bucket that is sent again keeps its number.

    `source` has the bytes: the group that meets there, or the sender's tensor itself on the engine's device.
    """

    number: int
    entries: list[Entry]
    num_bytes: int
    source: Meeting | Tensor | OnDevice


class OnDevice:
    """Pickles as the handle of a CUDA tensor; unpickled, it is the tensor itself, on the engine's only device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        rebuild, arguments = reduce_tensor(self._tensor)
        # The number of the device; the sender may see more devices than the engine.
        return rebuild, (*arguments[:6], 0, *arguments[7:])


class Member:
    """A process in the group of a hand-over.

    Args:
        meeting: The meeting; all members come within its time limit.
        address: The address where the other members reach this process.
        listener: The socket of the meeting's port; rank 0 has it.

    Raises:
        RuntimeError: A member did not come, or ended meanwhile.
    """

    def __init__(self, meeting: Meeting, address: str, listener: socket.socket | None = None) -> None:
        self._seconds, self._nccl = meeting.seconds, meeting.backend == "nccl"
        limit = timedelta(seconds=meeting.seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            meeting.address,
            meeting.port,
            is_master=listener is not None,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        if self._nccl:
            # With NCCL's own limit, since its watchdog ends the process there; `broadcast` has a shorter one.
            options = dist.ProcessGroupNCCL.Options()
            self._group: Any = dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
        else:
            prepare_gloo()
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, options)

    def broadcast(self, data: Tensor, broken: Callable[[], bool] = lambda: False) -> None:
        """Send the bytes of rank 0 to all members, within the time limit.

        Raises:
            RuntimeError: A member ended or did not take part in time, or `broken` said so.
        """
        work = self._group.broadcast(data, 0)
        deadline = time.monotonic() + self._seconds
        while not work.is_completed():
            if broken() or time.monotonic() > deadline:
                raise RuntimeError(f"a bucket did not reach all engines within {self._seconds:g} s")
            time.sleep(1e-4)
        work.wait()

    def close(self) -> None:
        """Leave the group, also in the middle of an operation."""
        if self._nccl:
            self._group.abort()
        self._group = None


class Receiver:
    """The side of an engine, which other members reach at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._meeting: Meeting | None = None
        self._member: Member | None = None

    def receive(self, parcel: Parcel) -> Bucket:
        """Return the bucket of a parcel.

        Raises:
            RuntimeError: The group broke.
        """
        if isinstance(parcel.source, Tensor):
            return Bucket(parcel.entries, parcel.source)
        assert isinstance(parcel.source, Meeting)
        device = "cuda" if parcel.source.backend == "nccl" else "cpu"
        data = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=device)
        try:
            if self._member is None or parcel.source != self._meeting:
                self.close()
                self._meeting, self._member = parcel.source, Member(parcel.source, self._address)
            self._member.broadcast(data)
        except RuntimeError:
            self.close()
            raise
        return Bucket(parcel.entries, data)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._member is not None:
            self._member.close()
        self._member = None


def device_id(device: torch.device | None = None) -> str:
    """Return an id of a GPU (default: the first that this process sees), equal in all processes; empty for a CPU."""
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
