"""`hand_over`: send weights to engines in other processes; an engine that is lost does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rl_train.cluster.host import listen_on
from rl_train.engines.rpc import EngineLostError, RemoteEngine
from rl_train.weight_sync.buckets import Bucket, Pairs, in_buckets
from rl_train.weight_sync.transport import LOOPBACK, Meeting, Member, OnDevice, Parcel, device_id

# The engines that were lost, by number.
Losses = dict[int, EngineLostError]


def hand_over(
    engines: Sequence[RemoteEngine], pairs: Pairs, *, check: bool, bucket_bytes: int, address: str = LOOPBACK
) -> Losses:
    """Send tensors to engines, each bucket to all engines before the next bucket is made; return the losses.

    A bucket is broadcast in a process group of this process and the engines. NCCL carries it where all of them have
    GPUs of their own; an engine on the GPU of the weights reads it in place, by CUDA IPC; gloo carries it elsewhere.
    When an engine is lost, the other engines form a new group. The extra memory is a bucket, here and in each engine.

    Args:
        engines: The engines; the first call waits until they have started.
        pairs: Names and whole tensors.
        check: Send a checksum of each tensor.
        bucket_bytes: The bytes of a bucket.
        address: The address where the engines reach this process.

    Raises:
        RuntimeError: A bucket did not reach an engine that is alive.
        Exception: The error of an engine that refused the weights; the other engines wait for more.
    """
    sender = _Sender(engines, address)
    try:
        for bucket in in_buckets(pairs, bucket_bytes, check=check):
            sender.send(bucket)
        sender.call("load", {number: None for number in sender.left})
    finally:
        sender.close()
    return sender.losses


def call_all(
    calls: Mapping[int, Callable[[], Any]],
    meanwhile: Callable[[list[Future[Any]]], None] = lambda calls: None,
) -> tuple[dict[int, Any], Losses]:
    """Call methods of engines at once, wait for all, and return the results and the losses; raise an engine's error.

    `meanwhile` runs in this thread, with the futures of the calls.
    """
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        futures = {number: threads.submit(call) for number, call in calls.items()}
        meanwhile(list(futures.values()))
    errors = {number: error for number, future in futures.items() if (error := future.exception()) is not None}
    losses = {number: error for number, error in errors.items() if isinstance(error, EngineLostError)}
    for number, error in errors.items():
        if number not in losses:
            raise error
    return {number: future.result() for number, future in futures.items() if number not in losses}, losses


class _Sender:
    """The sender of one hand-over.

    Attributes:
        left: The engines that are alive, by number.
        losses: The engines that were lost.
    """

    def __init__(self, engines: Sequence[RemoteEngine], address: str) -> None:
        self.left, self.losses = dict(enumerate(engines)), Losses()
        self._address, self._number = address, 0
        self._meeting: Meeting | None = None
        self._member: Member | None = None
        self._devices = self.call("ready")

    def call(
        self,
        method: str,
        argument: Mapping[int, Any] | None = None,
        meanwhile: Callable[[list[Future[Any]]], None] = lambda calls: None,
    ) -> dict[int, Any]:
        """Call a method of all engines that are left, with an argument for each; see `call_all`."""
        arguments = {number: () if argument is None else (argument[number],) for number in self.left}
        calls = {number: partial(engine.call, method, *arguments[number]) for number, engine in self.left.items()}
        results, losses = call_all(calls, meanwhile)
        for number in losses:
            del self.left[number]
        self.losses |= losses
        return results

    def send(self, bucket: Bucket) -> None:
        """Send a bucket to all engines that are left, again while engines are lost."""
        self._number += 1
        while self.left:
            lost = len(self.losses)
            missed = self._send(bucket)
            if not missed:
                return
            if len(self.losses) == lost:
                raise RuntimeError(f"the transport of the weights broke off, though all engines answer: {missed}")

    def close(self) -> None:
        """Leave the group; the next bucket makes a new one. Safe to call twice."""
        if self._member is not None:
            self._member.close()
        self._meeting = self._member = None

    def _send(self, bucket: Bucket) -> str:
        """Send a bucket once; return why an engine missed it, empty if all engines that are left have it."""
        near, far, backend = self._routes(bucket.data.device)
        listener = None
        if far and self._meeting is None:
            listener = listen_on(self._address)
            seconds = max(engine.silence for engine in self.left.values())
            self._meeting = Meeting(backend, self._address, listener.getsockname()[1], 0, 1 + len(far), seconds)

        def broadcast(calls: list[Future[Any]]) -> None:
            """Take part in the group while the engines do."""
            if self._meeting is None:
                return
            try:
                self._member = self._member or Member(self._meeting, self._address, listener)
                data = bucket.data if backend == "nccl" else bucket.data.cpu()
                self._member.broadcast(data, lambda: any(call.done() and call.exception() for call in calls))
            except RuntimeError:
                self.close()  # engines that wait for bytes say that they missed them

        parcels: dict[int, Any] = {}
        for number in self.left:
            source: Meeting | OnDevice = OnDevice(bucket.data)
            if number in far:
                assert self._meeting is not None
                source = self._meeting._replace(rank=1 + far.index(number))
            parcels[number] = Parcel(self._number, bucket.entries, len(bucket.data), source)
        if near:
            torch.cuda.ipc_collect()  # frees what the engines have read
        lost = len(self.losses)
        missed = [why for why in self.call("load", parcels, broadcast).values() if why]
        if missed or len(self.losses) > lost:
            self.close()
        return next(iter(missed), "")

    def _routes(self, device: torch.device) -> tuple[list[int], list[int], str]:
        """Return the engines that read the device of the weights in place, those of the group, and its backend."""
        own, numbers = device_id(device), list(self.left)
        near = [number for number in numbers if own and self._devices[number] == own]
        far = [number for number in numbers if number not in near]
        ids = {self._devices[number] for number in far}
        if own and "" not in ids and len(ids) == len(far):
            return near, far, "nccl"
        return [], numbers, "gloo"
