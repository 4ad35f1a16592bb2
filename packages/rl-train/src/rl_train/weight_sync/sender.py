"""`sync_weights`: send weights to engines in other processes, past the loss of single engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rl_train.cluster.host import listen_on
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Process
from rl_train.weight_sync.buckets import Bucket, NamedTensors, in_buckets
from rl_train.weight_sync.transport import LOOPBACK, BucketMessage, OnDevice, Peer, Rendezvous, device_id

# The engines that were lost, by number.
LostEngines = dict[int, ProcessLost]


def sync_weights(
    engines: Sequence[Process],
    named_tensors: NamedTensors,
    *,
    check: bool,
    bucket_bytes: int,
    address: str = LOOPBACK,
) -> LostEngines:
    """Send tensors to engines, each bucket to all engines before the next bucket is made; return the lost engines.

    A bucket is broadcast in a process group of this process and the engines. NCCL carries it where all of them have
    separate GPUs, gloo elsewhere. An engine on the GPU of the weights reads the bucket in place, by CUDA IPC.
    When an engine is lost, the other engines form a new group. The extra memory is a bucket, here and in each engine.

    Args:
        engines: The engines; the first call waits until they have started.
        named_tensors: Hugging Face names and whole tensors.
        check: Send a checksum of each tensor.
        bucket_bytes: The bytes of a bucket.
        address: The address where the engines reach this process.

    Raises:
        RuntimeError: A bucket did not reach an engine that is alive.
        Exception: The error of an engine that refused the weights; the other engines wait for more.
    """
    sender = _Sender(engines, address)
    try:
        for bucket in in_buckets(named_tensors, bucket_bytes, check=check):
            sender.send(bucket)
        sender.call("load", {number: None for number in sender.engines})
    finally:
        sender.close()
    return sender.lost_engines


def call_all(
    calls: Mapping[int, Callable[[], Any]],
    meanwhile: Callable[[list[Future[Any]]], None] = lambda calls: None,
) -> tuple[dict[int, Any], LostEngines]:
    """Call methods of engines at once, wait for all, and return the results and the lost engines.

    `meanwhile` runs in this thread, with the futures of the calls.

    Raises:
        Exception: The error of an engine that is alive.
    """
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        futures = {number: threads.submit(call) for number, call in calls.items()}
        meanwhile(list(futures.values()))
    errors = {number: error for number, future in futures.items() if (error := future.exception()) is not None}
    lost_engines = {number: error for number, error in errors.items() if isinstance(error, ProcessLost)}
    for number, error in errors.items():
        if number not in lost_engines:
            raise error
    return {number: future.result() for number, future in futures.items() if number not in lost_engines}, lost_engines


class _Sender:
    """The sender of one weight sync.

    Attributes:
        engines: The engines that are alive, by number.
        lost_engines: The engines that were lost, by number.
    """

    def __init__(self, engines: Sequence[Process], address: str) -> None:
        self.engines, self.lost_engines = dict(enumerate(engines)), LostEngines()
        self._address, self._number = address, 0
        self._rendezvous: Rendezvous | None = None
        self._peer: Peer | None = None
        self._devices = self.call("ready")

    def call(
        self,
        method: str,
        argument: Mapping[int, Any] | None = None,
        meanwhile: Callable[[list[Future[Any]]], None] = lambda calls: None,
    ) -> dict[int, Any]:
        """Call a method of all engines that are alive, with an argument for each; see `call_all`."""
        arguments = {number: () if argument is None else (argument[number],) for number in self.engines}
        calls = {number: partial(engine.call, method, *arguments[number]) for number, engine in self.engines.items()}
        results, lost_engines = call_all(calls, meanwhile)
        for number in lost_engines:
            del self.engines[number]
        self.lost_engines |= lost_engines
        return results

    def send(self, bucket: Bucket) -> None:
        """Send a bucket to all engines that are alive, again while engines are lost."""
        self._number += 1
        while self.engines:
            num_lost = len(self.lost_engines)
            missed = self._send(bucket)
            if not missed:
                return
            if len(self.lost_engines) == num_lost:
                raise RuntimeError(f"the weights did not reach all engines, though all engines answer: {missed}")

    def close(self) -> None:
        """Leave the group; the next bucket makes a new one. Safe to call twice."""
        if self._peer is not None:
            self._peer.close()
        self._rendezvous = self._peer = None

    def _send(self, bucket: Bucket) -> str:
        """Send a bucket once; return why an engine missed it, empty if all engines that are alive have it."""
        on_device, in_group, backend = self._routes(bucket.data.device)
        listener = None
        if in_group and self._rendezvous is None:
            listener = listen_on(self._address)
            seconds = max(engine.silence for engine in self.engines.values())
            self._rendezvous = Rendezvous(
                backend, self._address, listener.getsockname()[1], 0, 1 + len(in_group), seconds
            )

        def broadcast(calls: list[Future[Any]]) -> None:
            """Broadcast the bucket while the engines receive it."""
            if self._rendezvous is None:
                return
            try:
                self._peer = self._peer or Peer(self._rendezvous, self._address, listener)
                data = bucket.data if backend == "nccl" else bucket.data.cpu()
                self._peer.broadcast(data, lambda: any(call.done() and call.exception() for call in calls))
            except RuntimeError:
                self.close()  # engines that wait for bytes answer that they missed them

        messages: dict[int, Any] = {}
        for number in self.engines:
            source: Rendezvous | OnDevice = OnDevice(bucket.data)
            if number in in_group:
                assert self._rendezvous is not None
                source = self._rendezvous._replace(rank=1 + in_group.index(number))
            messages[number] = BucketMessage(self._number, bucket.entries, len(bucket.data), source)
        if on_device:
            torch.cuda.ipc_collect()  # frees the buckets that the engines have read
        num_lost = len(self.lost_engines)
        failures = [reason for reason in self.call("load", messages, broadcast).values() if reason]
        if failures or len(self.lost_engines) > num_lost:
            self.close()
        return next(iter(failures), "")

    def _routes(self, device: torch.device) -> tuple[list[int], list[int], str]:
        """Return the engines that read the bucket in place, the engines of the process group, and its backend."""
        weights_device, numbers = device_id(device), list(self.engines)
        on_device = [number for number in numbers if weights_device and self._devices[number] == weights_device]
        in_group = [number for number in numbers if number not in on_device]
        ids = {self._devices[number] for number in in_group}
        if weights_device and "" not in ids and len(ids) == len(in_group):
            return on_device, in_group, "nccl"
        return [], numbers, "gloo"
