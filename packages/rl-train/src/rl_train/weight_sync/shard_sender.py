"""`ShardSender`: send the weights of an actor to native engines in other processes, from shard to shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from traceback import clear_frames
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.transfer import Holdings, ShardCopy, TargetShards, all_gather_json, plan_copies, rank_in
from rl_models import Policy
from rl_train.cluster.addresses import listen_on
from rl_train.cluster.launch import from_first
from rl_train.weight_sync.buckets import default_bucket_bytes
from rl_train.weight_sync.changed_values import SentValues, send_changes
from rl_train.weight_sync.sender import EngineHandle, Receivers, wait_for_all
from rl_train.weight_sync.shard_exchange import ShardPlan, exchange_shards, plans_of
from rl_train.weight_sync.transport import LOOPBACK, BucketMissed, Peer, Rendezvous, WeightMessage, device_id


class NoShards(Exception):
    """An engine takes whole tensors alone, or shares a GPU with another process of the weight sync."""


class ShardSender:
    """Send the weights of an actor; each of its ranks holds a sender.

    Each rank sends the boxes that it holds straight to the processes of the engines that need them, which write them
    into their parameters. No rank gathers the model. NCCL carries the boxes where each process has a separate GPU, gloo
    where all are on CPUs. The process group and the plan stay for the next weight sync.

    Args:
        check: Send checksums.
        bucket_bytes: The most bytes that a process sends or receives at once (default: 256 MiB on a GPU, 64 MiB on a
            CPU).
        address: The address where the other processes reach the first rank.
        changed_only: Send the values that changed since the last weight sync, after a first one of all values; see
            `changed_values`. Each rank then keeps what it has sent in host memory.

    Attributes:
        backend: The backend of the last weight sync.
        plan: The copies of this rank in the last weight sync.
        sent_bytes: The bytes that this rank sent in the last weight sync.
    """

    def __init__(
        self,
        check: bool = False,
        bucket_bytes: int | None = None,
        address: str = LOOPBACK,
        *,
        changed_only: bool = False,
    ) -> None:
        self.options, self._changed_only = (check, bucket_bytes, address), changed_only
        self.backend = ""
        self.sent_bytes = 0
        self._sent: SentValues | None = None
        self._key: tuple[object, ...] = ()
        # The processes that have told their shards, on the first rank, and the shards; None: they take whole tensors.
        self._told: list[Receivers] = []
        self._shards: list[TargetShards] | None = None
        self.plan = ShardPlan([], 0, check)
        # In a list, so that the end of this object closes it: torch may abort at the end of a program with open groups.
        self._peers: list[Peer] = []
        self._calls: list[Future[Any]] = []
        finalize(self, _close, self._peers)

    def sync(self, actor: Policy, engines: Sequence[EngineHandle] | None) -> None:
        """Send the weights, and wait until the engines have them; all ranks call this.

        Args:
            actor: An `Actor` on the ranks, or `WholeBatches`.
            engines: The engines, on the first rank; None where it cannot reach them, and on the other ranks.

        Raises:
            NoShards: The engines need whole tensors; on all ranks.
            ValueError: The weights are not those of the engines' model, or need whole tensors with `changed_only`; on
                all ranks.
            EnginesLost: Some engines were lost; on the first rank.
            BucketMissed: A part did not arrive. Another rank has the reason, or all engines are alive.
            Exception: The error of an engine that refused the weights, on the first rank.
        """
        self._calls = []
        try:
            self._sync(actor, engines)
        except BaseException as error:
            clear_frames(error.__traceback__)  # they keep operations, and these the group
            self.close()
            if isinstance(error, NoShards) and self._changed_only:
                raise ValueError(f"{error}; changed weights alone go from shard to shard: send all weights") from None
            if isinstance(error, BucketMissed) and self._calls:
                wait_for_all(self._calls, error)
            raise

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        _close(self._peers)
        self._key = ()

    def _sync(self, actor: Policy, engines: Sequence[EngineHandle] | None) -> None:
        group = actor.grid.everyone
        parties = self._parties(engines, actor.grid.device, group)
        self.backend = parties.backend
        weights = actor.held_weights()
        key = (parties, weights.key, weights.change is None)
        name = ""
        if key != self._key:
            self.close()
            name = self._connect(weights, parties, group)
            self._key = key
        (peer,) = self._peers
        if engines is not None:
            self._announce(peer, engines, parties, name)
        if name:
            self.plan = peer.published(f"{name} {peer.rendezvous.rank}")
            self._sent = SentValues(self.plan) if self.plan.changed_only else None
        self._exchange(peer, weights, whole=bool(name))
        wait_for_all(self._calls)

    def _exchange(self, peer: Peer, weights: Holdings, *, whole: bool) -> None:
        def read(copy: ShardCopy, buffer: Tensor) -> None:
            copy.read(weights, buffer)
            if whole and self._sent is not None:
                self._sent.keep(copy, buffer)

        if self._sent is not None and not whole:
            self.sent_bytes = send_changes(peer, self.plan, self._sent, read, self._broken)
        else:
            exchange_shards(peer, self.plan, read, broken=self._broken)
            self.sent_bytes = sum(copy.nbytes for copies in self.plan.rounds for copy in copies)

    def _parties(
        self, engines: Sequence[EngineHandle] | None, device: torch.device, group: ProcessGroup | None
    ) -> _Parties:
        """Tell all ranks which processes of the engines receive weights."""
        ready: list[Receivers] | None = None
        failure: Exception | None = None
        try:
            if engines is not None:
                ready = wait_for_all([engine.submit("ready") for engine in engines])
                if ready != self._told:
                    shards = wait_for_all([engine.submit("shards") for engine in engines])
                    self._told, self._shards = (
                        ready,
                        [each for some in shards for each in some] if all(shards) else None,
                    )
        except Exception as error:  # any error: the other ranks wait for this one
            ready, failure = None, error
        seconds = max((engine.silence for engine in engines or ()), default=0.0)
        messages = all_gather_json([device_id(device), ready, seconds, self._shards is not None], group)
        devices = [message[0] for message in messages]
        _, ready, seconds, have_shards = messages[0]
        if failure is not None:
            raise failure
        if ready is None:
            raise BucketMissed("the first rank does not reach the engines")
        if not have_shards:
            raise NoShards("an engine takes whole tensors")
        return _Parties(devices, ready, seconds)

    def _connect(self, weights: Holdings, parties: _Parties, group: ProcessGroup | None) -> str:
        """Make the group and the plans, and return the name under which the first rank publishes them."""
        rendezvous: Rendezvous = from_first(lambda: self._lead(weights, parties), group)
        if not self._peers:
            self._peers.append(Peer(rendezvous._replace(rank=rank_in(group))))
        return rendezvous.key

    def _lead(self, weights: Holdings, parties: _Parties) -> Rendezvous:
        """Open the group on the first rank, and publish the plan of each peer."""
        check, bucket_bytes, address = self.options
        senders, receivers = len(parties.devices), sum(map(len, parties.ready))
        copies = plan_copies(weights, self._shards or [])
        most = bucket_bytes or default_bucket_bytes(parties.backend == "nccl")
        plans = plans_of(copies, senders, receivers, most, check=check, changed_only=self._changed_only)
        listener = listen_on(address)
        where = address, listener.getsockname()[1], 0, senders + receivers, parties.seconds, uuid4().hex
        rendezvous = Rendezvous(parties.backend, *where)
        self._peers.append(Peer(rendezvous, listener))
        for rank, plan in enumerate(plans):
            self._peers[0].publish(f"{rendezvous.key} {rank}", plan)
        return rendezvous

    def _announce(self, peer: Peer, engines: Sequence[EngineHandle], parties: _Parties, plan: str) -> None:
        ranks = itertools.count(len(parties.devices))
        for engine, receivers in zip(engines, parties.ready, strict=True):
            places = [peer.rendezvous._replace(rank=next(ranks)) for _ in receivers]
            messages = [WeightMessage(place, None, plan, shards=True) for place in places]
            self._calls.append(engine.submit("load", messages))

    def _broken(self) -> bool:
        return any(call.done() and call.exception() for call in self._calls)


class _Parties(NamedTuple):
    """The devices of the actor's ranks, the receivers of each engine, and the time limit of a round."""

    devices: list[str]
    ready: list[Receivers]
    seconds: float

    @property
    def backend(self) -> str:
        """The backend between all devices; NoShards where NCCL would have two processes on a GPU."""
        devices = self.devices + [device for receivers in self.ready for device, _ in receivers]
        if "" not in devices and len(set(devices)) < len(devices):
            raise NoShards("two processes share a GPU")
        return "gloo" if "" in devices else "nccl"


def _close(peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()
    peers.clear()
