"""`WeightSender`: send weights to engines in other processes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from traceback import clear_frames
from typing import Any, Protocol
from uuid import uuid4
from weakref import finalize

import torch
from torch import Tensor

from parallel_layers.device import gpu, on_gpu
from rl_train.cluster.addresses import listen_on
from rl_train.engines.interface import WeightsLostError, WorkerEngine
from rl_train.processes.errors import ProcessLost
from rl_train.weight_sync.buckets import Bucket, BucketPlan, NamedTensors, in_buckets
from rl_train.weight_sync.transport import LOOPBACK, BucketMissed, OnDevice, Peer, Rendezvous, WeightMessage, device_id

# The processes of an engine that receive weights: the id of each one's device (`device_id`), and its key.
Receivers = list[tuple[str, str]]


class EngineHandle(Protocol):
    """An engine that receives weights, such as a `Process`.

    Attributes:
        silence: The seconds without a sign of life after which the engine is lost.
    """

    silence: float

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call "ready", "shards" or "load" without waiting; see `rl_train.engines.process`."""


class WorkersOf:
    """An `EngineHandle` of an engine in this process, whose worker processes receive the weights."""

    def __init__(self, engine: WorkerEngine, silence: float = 1800.0) -> None:
        self._engine, self.silence = engine, silence

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """See `EngineHandle`."""
        call: Callable[..., Any] = self._engine.receivers if method == "ready" else self._engine.receive
        thread = ThreadPoolExecutor(1)
        try:
            return thread.submit(call, *args)
        finally:
            thread.shutdown(wait=False)


class EnginesLost(RuntimeError):
    """Some of the called engines were lost; `losses` has their errors by number."""

    def __init__(self, losses: dict[int, ProcessLost]) -> None:
        super().__init__(losses)
        self.losses = losses


class WeightSender:
    """Send tensors to engines in other processes.

    An engine on the GPU of the weights reads buckets in place, by CUDA IPC. The others get them by a broadcast: NCCL
    carries it where each of them has a separate GPU, gloo elsewhere. While one bucket travels the next one is packed;
    the extra memory is two buckets, here and in each engine.

    Process groups and the plan of buckets stay. A weight sync is one message to each engine. The first one, and those
    after new engines and after one that broke off, also publish what each bucket holds.

    Args:
        check: Send a checksum of each tensor.
        bucket_bytes: The size of a bucket; see `in_buckets`.
        address: The address where the engines reach this process.

    Attributes:
        options: The arguments.
        ways: How the last weight sync reached each receiver: "in place", "nccl" or "gloo".
    """

    def __init__(self, check: bool = False, bucket_bytes: int | None = None, address: str = LOOPBACK) -> None:
        self.options = check, bucket_bytes, address
        self.ways: list[str] = []
        self._key: tuple[object, ...] = ()
        self._plan: list[BucketPlan] = []
        # The group of each way, and the operations of the buckets under way, with their bytes.
        self._peers: dict[str, Peer] = {}
        self._works: deque[list[tuple[Peer, Any, Tensor]]] = deque()
        finalize(self, _close_all, self._peers, self._works)  # torch may abort at the end of a program with open groups

    def sync(self, engines: Sequence[EngineHandle], named_tensors: NamedTensors) -> None:
        """Send whole tensors, and wait until the engines have taken them; the first call waits until they have started.

        Raises:
            EnginesLost: Some engines were lost; the other engines lack the rest.
            WeightsLostError: The first bucket is that of the last weight sync, and a later one is not; sync again.
            BucketMissed: A bucket did not reach an engine, and all engines are alive.
            Exception: The error of an engine that refused the weights; the other engines lack the rest.
        """
        ready = wait_for_all([engine.submit("ready") for engine in engines])
        self._engines, self._calls = engines, list[Future[Any]]()
        check, bucket_bytes, _ = self.options
        try:
            self._send(in_buckets(named_tensors, bucket_bytes, check=check), ready)
        except BaseException as error:
            clear_frames(error.__traceback__)  # they keep operations, and these the groups
            self.close()
            if isinstance(error, BucketMissed):
                wait_for_all(self._calls, error)
            raise

    def close(self) -> None:
        """Leave the groups. Safe to call twice."""
        _close_all(self._peers, self._works)
        self._key, self._plan = (), []

    def _send(self, buckets: Iterable[Bucket], ready: list[Receivers]) -> None:
        sent: list[BucketPlan] = []
        name, ring = uuid4().hex, torch.empty(0)
        for bucket in buckets:
            entries, ring, _ = bucket
            if not sent:
                self._connect(ready, ring.device)
                name = "" if self._plan[:1] == [entries] else name
                self._announce(ring, ready, name)
            if name:
                self._publish(f"{name} {len(sent)}", entries)
            elif self._plan[len(sent) : len(sent) + 1] != [entries]:
                raise WeightsLostError(f"bucket {len(sent)} has other tensors than in the last weight sync")
            sent.append(entries)
            self._post(bucket.data)
            # Engines that read in place, or learn of a bucket when it is published, come for it after the one before.
            self._wait(0 if name or "in place" in self.ways else 1)
        if not sent:
            self._connect(ready, ring.device)
            self._announce(ring, ready, name)
        if name:
            self._publish(f"{name} {len(sent)}", [])
        elif len(sent) < len(self._plan):
            raise WeightsLostError(f"{len(sent)} buckets came, and {len(self._plan)} in the last weight sync")
        self._wait(0)
        wait_for_all(self._calls)
        self._plan = sent

    def _connect(self, ready: list[Receivers], device: torch.device) -> None:
        """Make groups with the engines; no effect where there are groups with the same engines."""
        weights_device, seconds = device_id(device), max(engine.silence for engine in self._engines)
        key = (ready, weights_device, seconds)
        if key == self._key:
            return
        self.close()
        ids = [id for receivers in ready for id, _ in receivers]
        others = [id for id in ids if not id or id != weights_device]
        nccl = bool(weights_device) and "" not in others and len(set(others)) == len(others)
        self.ways = ["in place" if id and id == weights_device else "nccl" if nccl else "gloo" for id in ids]
        address = self.options[2]
        for way in sorted(set(self.ways), reverse=True):
            listener, backend = listen_on(address), "nccl" if way == "nccl" else "gloo"
            meeting = (address, listener.getsockname()[1], 0, 1 + self.ways.count(way), seconds, uuid4().hex)
            self._peers[way] = Peer(Rendezvous(backend, *meeting), listener)
        self._key = key

    def _announce(self, ring: Tensor, ready: list[Receivers], plan: str) -> None:
        ranks, ways = Counter[str](), iter(self.ways)

        def message() -> WeightMessage:
            ranks[way := next(ways)] += 1
            rendezvous = self._peers[way].rendezvous._replace(rank=ranks[way])
            return WeightMessage(rendezvous, OnDevice(ring) if way == "in place" else None, plan)

        self._calls = [
            engine.submit("load", [message() for _ in receivers])
            for engine, receivers in zip(self._engines, ready, strict=True)
        ]

    def _publish(self, name: str, entries: BucketPlan) -> None:
        for peer in self._peers.values():
            peer.publish(name, entries)

    def _post(self, data: Tensor) -> None:
        """Begin to send a bucket."""
        self._works.append([])
        for way, peer in self._peers.items():
            data = data.cpu() if way == "gloo" else data
            if way == "in place" and on_gpu(data):
                gpu.current_stream(data.device).synchronize()  # the bucket is packed
            work = peer.meet(self._broken) if way == "in place" else peer.broadcast(data, self._broken)
            self._works[-1].append((peer, work, data))

    def _wait(self, most: int) -> None:
        """Wait until at most this number of buckets are under way."""
        while len(self._works) > most:
            for peer, work, _ in self._works[0]:
                peer.wait(work, self._broken)
            self._works.popleft()

    def _broken(self) -> bool:
        return any(call.done() and call.exception() for call in self._calls)


def _close_all(peers: dict[str, Peer], works: deque[Any]) -> None:
    works.clear()
    for peer in peers.values():
        peer.close()
    peers.clear()


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
