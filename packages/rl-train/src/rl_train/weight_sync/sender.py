"""`sync_weights`: send weights to engines in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rl_train.cluster.host import listen_on
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Process
from rl_train.weight_sync.buckets import Bucket, NamedTensors, in_buckets
from rl_train.weight_sync.transport import LOOPBACK, BucketMessage, BucketMissed, OnDevice, Peer, Rendezvous, device_id


class EnginesLost(RuntimeError):
    """Some of the called engines were lost; `losses` has their errors by number."""

    def __init__(self, losses: dict[int, ProcessLost]) -> None:
        super().__init__(losses)
        self.losses = losses


def sync_weights(
    engines: Sequence[Process],
    named_tensors: NamedTensors,
    *,
    check: bool,
    bucket_bytes: int,
    address: str = LOOPBACK,
) -> None:
    """Send tensors to engines, each bucket to all engines before the next bucket is made.

    A bucket is broadcast in a process group of this process and the engines. NCCL carries it where all of them have
    separate GPUs, gloo elsewhere. An engine on the GPU of the weights reads the bucket in place, by CUDA IPC. The extra
    memory is a bucket, here and in each engine.

    Args:
        engines: The engines; the first call waits until they have started.
        named_tensors: Hugging Face names and whole tensors.
        check: Send a checksum of each tensor.
        bucket_bytes: The bytes of a bucket.
        address: The address where the engines reach this process.

    Raises:
        EnginesLost: Some engines were lost; the other engines wait for more.
        BucketMissed: A bucket did not reach an engine, and all engines are alive.
        Exception: The error of an engine that refused the weights; the other engines wait for more.
    """
    devices = wait_for_all([engine.submit("ready") for engine in engines])
    sender = None
    try:
        for bucket in in_buckets(named_tensors, bucket_bytes, check=check):
            sender = sender or _Sender(engines, devices, bucket.data.device, address)
            sender.send(bucket)
        wait_for_all([engine.submit("load", None) for engine in engines])
    finally:
        if sender is not None:
            sender.close()


def wait_for_all(calls: Sequence[Future[Any]], missed: BucketMissed | None = None) -> list[Any]:
    """Wait for calls of engines, and return their results.

    Raises:
        EnginesLost: Some of the engines were lost.
        Exception: The error of an engine that is alive, or else `missed`, which may be its consequence.
    """
    errors = {number: error for number, call in enumerate(calls) if (error := call.exception()) is not None}
    if losses := {number: error for number, error in errors.items() if isinstance(error, ProcessLost)}:
        raise EnginesLost(losses)
    if causes := [*errors.values(), *([missed] if missed else [])]:
        raise min(causes, key=lambda cause: isinstance(cause, BucketMissed))
    return [call.result() for call in calls]


class _Sender:
    """The sender of one weight sync; `devices` are the engines' device ids, and `device` has the weights."""

    def __init__(self, engines: Sequence[Process], devices: Sequence[str], device: torch.device, address: str) -> None:
        self._engines = engines
        weights_device = device_id(device)
        others = [engine_device for engine_device in devices if engine_device != weights_device]
        self._nccl = bool(weights_device) and "" not in others and len(set(others)) == len(others)
        joining = [number for number, id in enumerate(devices) if not self._nccl or id != weights_device]
        listener, seconds = listen_on(address), max(engine.silence for engine in engines)
        port, backend = listener.getsockname()[1], "nccl" if self._nccl else "gloo"
        rendezvous = Rendezvous(backend, address, port, 0, 1 + len(joining), seconds)
        # By the number of the engine; engines without a rendezvous read buckets in place.
        self._rendezvous = {number: rendezvous._replace(rank=rank) for rank, number in enumerate(joining, start=1)}
        self._peer = Peer(rendezvous, address, listener)

    def send(self, bucket: Bucket) -> None:
        """Send a bucket to all engines; see `sync_weights`."""
        if len(self._rendezvous) < len(self._engines):
            torch.cuda.ipc_collect()  # frees the buckets that the engines have read
        calls = []
        for number, engine in enumerate(self._engines):
            source = self._rendezvous.get(number) or OnDevice(bucket.data)
            calls.append(engine.submit("load", BucketMessage(bucket.entries, len(bucket.data), source)))
        missed = None
        if self._rendezvous:
            try:
                data = bucket.data if self._nccl else bucket.data.cpu()
                self._peer.broadcast(data, lambda: any(call.done() and call.exception() for call in calls))
            except BucketMissed as error:
                # A new exception: the traceback would keep the group, and the engines would wait for bytes.
                missed = BucketMissed(str(error))
                self.close()
        wait_for_all(calls, missed)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        self._peer.close()
