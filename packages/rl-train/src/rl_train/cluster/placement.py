"""`Placement`: devices of a Ray cluster, reserved together for one or several groups of ranks."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel_layers import ParallelDims
from rl_train.cluster.resources import Resources, connected_ray, import_ray

_POLL_SECONDS = 0.2
# Ray counts in ten-thousandths; this tolerance lets three groups of 1/3 fit on a device.
_PRECISION = 1e-3
_INCARNATIONS = itertools.count()


class Placement:
    """Reserve a Ray placement group with one bundle for each device, or for devices of one node.

    Args:
        devices: The number of devices.
        resources: The amounts of each device, and the spread of the bundles (default: `Resources()`).
        per_bundle: The devices of each bundle, which lie on one node: those of an engine over several devices.

    `RayModelGroup(..., resources=placement.share(0.5))` puts a group on half of each device. Groups whose shares add up
    to 1 share the devices, each group with its own processes. `group` is Ray's handle. Use a placement as a context
    manager, or call `remove`.

    Raises:
        ValueError: Ray is not installed, `per_bundle` does not divide the devices, or see `wait`.
    """

    def __init__(self, devices: int, resources: Resources | None = None, *, per_bundle: int = 1) -> None:
        if devices < 1:
            raise ValueError(f"devices={devices} must be at least 1")
        if per_bundle < 1 or devices % per_bundle:
            raise ValueError(f"devices={devices} are no multiple of per_bundle={per_bundle}; give more, or fewer")
        self.resources = resources or Resources()
        ray = connected_ray()
        self.accelerator = self.resources.accelerator(ray.cluster_resources())
        amounts = self.resources.bundle(self.accelerator)
        self.bundle = {name: per_bundle * amount for name, amount in amounts.items()}
        self.free = [1.0] * (devices // per_bundle)
        self.group = ray.util.placement_group([self.bundle] * len(self.free), strategy=self.resources.strategy)
        self._finalizer = weakref.finalize(self, _remove, self.group)
        try:
            self.wait()
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __len__(self) -> int:
        return len(self.free)

    def share(self, fraction: float) -> Share:
        """Return a fraction in (0, 1] of each device, for one group."""
        return Share(self, fraction)

    def wait(self) -> list[str]:
        """Wait until Ray has placed every bundle, and return the id of each bundle's node; Ray replaces a lost node.

        Raises:
            ValueError: The cluster had no room for `resources.timeout` seconds; the error lists what the cluster has.
        """
        ray = import_ray()
        deadline = time.monotonic() + self.resources.timeout
        while True:
            table = ray.util.placement_group_table(self.group)
            nodes: dict[int, str] = table.get("bundles_to_node_id", {})
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            if table["state"] == "CREATED" and set(nodes.values()) <= alive:
                return [nodes[bundle] for bundle in range(len(self))]
            if table["state"] == "REMOVED":
                raise ValueError("the placement has been removed; make a new one")
            if time.monotonic() > deadline:
                by_node = "; ".join(_amounts(node["Resources"]) for node in ray.nodes() if node["Alive"])
                raise ValueError(
                    f"{len(self)} x {self.bundle} with strategy {self.resources.strategy} found no room within "
                    f"{self.resources.timeout:g} s; the nodes have {by_node}; free in total: "
                    f"{_amounts(ray.available_resources())}. Add nodes, ask for less, or use another strategy"
                )
            time.sleep(_POLL_SECONDS)

    def remove(self) -> None:
        """Return the devices to the cluster; Ray ends their remaining processes. Safe to call twice."""
        self._finalizer()


@dataclass(frozen=True)
class Share:
    """A fraction of each device of a placement; see `Placement.share`."""

    placement: Placement
    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction} must lie in (0, 1]")

    def take(self, count: int, runs: Sequence[int]) -> list[int]:
        """Reserve this fraction of `count` devices and return their bundles in the order of `rank_order`.

        Raises:
            ValueError: Fewer devices than `count` have that fraction left.
        """
        nodes, free = self.placement.wait(), self.placement.free
        room = [bundle for bundle, left in enumerate(free) if left + _PRECISION >= self.fraction]
        if len(room) < count:
            raise ValueError(
                f"{count} ranks need {self.fraction:g} of a device each, but the {len(free)} devices of the placement "
                f"have {', '.join(f'{left:.3g}' for left in free)} left; ask for a smaller share or shut a group down"
            )
        seats = [(nodes[bundle], str(bundle)) for bundle in room]
        bundles = [room[i] for i in rank_order(seats, runs)[:count]]
        for bundle in bundles:
            free[bundle] -= self.fraction
        return bundles

    def give_back(self, bundles: Sequence[int]) -> None:
        """Return what `take` has reserved."""
        for bundle in bundles:
            self.placement.free[bundle] += self.fraction

    def start(self, kind: type, name: str, bundle: int, **options: Any) -> Any:
        """Start a Ray actor of a class on this fraction of a bundle; its argument is the name of the accelerator.

        A unique variable keeps Ray from reusing a process, which may have imported torch with another environment.
        """
        ray, resources = import_ray(), self.placement.resources
        threads = {"OMP_NUM_THREADS": str(max(1, int(resources.cpus * self.fraction)))}
        environment = {**threads, **resources.env, "RL_MODELS_GROUP": f"{name}/{next(_INCARNATIONS)}"}
        amounts = {
            name: int(amount * self.fraction * 10_000) / 10_000 for name, amount in self.placement.bundle.items()
        }
        actor = ray.remote(
            max_restarts=0,
            max_task_retries=0,
            num_cpus=amounts.pop("CPU"),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self.placement.group, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": environment},
            **options,
        )
        return actor(kind).remote(self.placement.accelerator)


def node_runs(dims: ParallelDims) -> list[int]:
    """Return the numbers of neighbouring ranks that belong on a node: of a replica, if there are several, and of tp."""
    return [dims.replica_size, dims.tp] if dims.replicate > 1 else [dims.tp]


def rank_order(seats: Sequence[tuple[str, str]], runs: Sequence[int]) -> list[int]:
    """Order devices as ranks, so that as many replicas and tensor-parallel groups as possible lie inside a node.

    Ranks of a node are neighbours, sorted by device; `runs` are the sizes of a replica and of a tp group. Nodes that
    hold a whole number of replicas come first, then those that hold a whole number of tp groups, larger nodes before
    smaller ones; any other node would shift the groups after it. `seats` are (node, device); the result has their
    indices, rank 0 first.
    """
    sizes = Counter(node for node, _ in seats)

    def key(index: int) -> tuple[Any, ...]:
        node, device = seats[index]
        return (
            [sizes[node] % run != 0 for run in runs],
            -sizes[node],
            node,
            not device.isdecimal(),
            int(device or 0) if device.isdecimal() else device,
        )

    return sorted(range(len(seats)), key=key)


def _remove(group: Any) -> None:
    ray = import_ray()
    if ray.is_initialized():
        ray.util.remove_placement_group(group)


def _amounts(resources: dict[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}
    hidden = ("memory", "object_store_memory")
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items()) if name not in hidden) or "nothing"
