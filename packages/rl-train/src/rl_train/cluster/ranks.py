"""`Ranks`: start, call and end the processes of a group, and keep track of their failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rl_models.calls import Method
from rl_train.cluster.future import Future
from rl_train.cluster.host import RankHost, Seat
from rl_train.cluster.placement import Share, rank_order
from rl_train.cluster.resources import import_ray
from rl_train.processes.errors import RankFailed


class Ranks:
    """One Ray actor for each bundle of `share.take`, numbered by node and device; see `RayModelGroup`.

    A replica and a tensor-parallel group lie inside a node where possible; see `rank_order`. `methods` says how each
    method is split over the ranks.

    Raises:
        RankFailed: A process did not start; the others have been ended.
    """

    def __init__(
        self,
        name: str,
        share: Share,
        bundles: Sequence[int],
        runs: Sequence[int],
        collective_timeout: float,
        methods: Mapping[str, Method],
    ) -> None:
        ray = import_ray()
        self.name, self._methods = name, methods
        self._calls = 0
        self._settled = -1
        self._broken: str | None = None
        self._behind: Future[Any] | None = None
        hosts = [share.start(RankHost, name, bundle) for bundle in bundles]
        try:
            references = [host.seat.remote() for host in hosts]
            seats: list[Seat] = ray.get(references, timeout=share.placement.resources.timeout)
        except ray.exceptions.RayError as error:
            kill(hosts)
            raise RankFailed(f"the processes of {name} did not start: {error}") from None
        except BaseException:
            kill(hosts)
            raise
        order = rank_order([(seat.node, seat.device) for seat in seats], runs)
        self._hosts = [hosts[i] for i in order]
        self.seats = [seats[i] for i in order]
        for host, env in zip(self._hosts, rank_environments(self.seats), strict=True):
            host.prepare.remote(env, collective_timeout)

    def send(
        self,
        method: str,
        payload: bytes,
        parts: Sequence[Any] | None,
        replies: Collection[int],
        join: Callable[[list[Any]], Any],
    ) -> Future[Any]:
        """Start a call on every rank; see `RankHost.call`.

        `parts` are each rank's part of the batch, or Ray's reference to the part. Only the ranks of `replies` return
        results; `join` makes one result of all answers.

        Raises:
            RankFailed: After an earlier failure the ranks are dead, waiting or out of step.
        """
        self._require_in_step(method)
        number, self._calls = self._calls, self._calls + 1
        # One copy in the object store for all ranks.
        shared = import_ray().put(payload)
        rank_arguments = parts or [None] * len(self._hosts)
        references = [
            host.call.remote(number, self._settled, method, shared, rank_arguments[rank], rank in replies)
            for rank, host in enumerate(self._hosts)
        ]
        return Future(f"{self.name}.{method}", method, references, self.seats, join, self._settle)

    def end(self) -> None:
        """Kill the processes. Safe to call twice."""
        kill(self._hosts)
        self._hosts = []
        self._broken = "its processes have been ended"

    def _settle(self, ended: Future[Any]) -> None:
        """Record from the end of a call whether the next call can run."""
        if (death := ended.death) is not None:
            self._broken = f"rank {death.rank} (node {death.node}) died or was stopped during {death.method}"
        elif ended.failed:
            ranks = ", ".join(map(str, sorted(ended.failed)))
            methods = sorted({failed.method for failed in ended.failed.values()})
            on_some = len(ended.failed) < len(self.seats)
            if on_some and any(self._methods[name].changes for name in methods):
                self._broken = f"{', '.join(methods)} failed on ranks {ranks} alone, so the ranks no longer agree"
            elif ended.waiting:
                self._behind = ended
            else:
                self._settled = max(self._settled, *(failed.number for failed in ended.failed.values()))

    def _require_in_step(self, method: str) -> None:
        if self._behind is not None:
            # Ranks that were still working when the call was abandoned may have finished since.
            waiting = list(self._behind.waiting)
            ready, _ = import_ray().wait(waiting, num_returns=len(waiting), timeout=0)
            if len(ready) == len(waiting):
                self._settled = max(self._settled, *(failed.number for failed in self._behind.failed.values()))
                self._behind = None
        why = self._broken
        if self._behind is not None:
            why = (
                f"{self._behind.method} failed on ranks {sorted(self._behind.failed)}, and ranks "
                f"{sorted(self._behind.waiting.values())} have not finished it"
            )
        if why is not None:
            raise RankFailed(f"{self.name}.{method} cannot run: {why}; call restart(), or shutdown()")


def rank_environments(seats: Sequence[Seat]) -> list[dict[str, str]]:
    """Return the environment variables of torchrun for each rank, in the order of the seats."""
    first = seats[0]
    sizes = Counter(seat.node for seat in seats)
    ranks_on_node: Counter[str] = Counter()
    environments = []
    for rank, seat in enumerate(seats):
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(seats)),
                "LOCAL_RANK": str(ranks_on_node[seat.node]),
                "LOCAL_WORLD_SIZE": str(sizes[seat.node]),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(first.port),
            }
        )
        ranks_on_node[seat.node] += 1
    return environments


def kill(hosts: Sequence[Any]) -> None:
    """Kill the processes of Ray actors, also stopped ones."""
    ray = import_ray()
    if ray.is_initialized():
        for host in hosts:
            ray.kill(host, no_restart=True)
