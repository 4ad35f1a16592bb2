"""The resources of a Ray cluster that a rank takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from parallel_layers.device import GPU

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")

# torch's name of a device type -> the resource that Ray counts such devices by.
RAY_RESOURCE = {GPU: "GPU", "xpu": "GPU", "npu": "NPU", "hpu": "HPU", "cpu": "CPU"}


@dataclass(frozen=True)
class Resources:
    """The resources that each rank takes of the cluster, and the spread of the ranks over its nodes.

    Attributes:
        device: torch's name of the device type, a key of `RAY_RESOURCE`; None: an accelerator if the cluster has
            one, else the CPU.
        cpus: CPU cores of each rank; on the CPU also its number of threads.
        strategy: Ray's placement strategy. "PACK": as few nodes as possible; "STRICT_PACK": one node, or an error;
            "SPREAD": as many nodes as possible; "STRICT_SPREAD": a separate node for each rank, or an error.
        extra: Further Ray resources of each rank, such as `{"accelerator_type:H100": 0.001}`.
        env: Environment variables that are set before the processes of the ranks start, such as `NCCL_DEBUG`.
        timeout: Seconds to wait for room in the cluster, and for the start of the processes.

    Raises:
        ValueError: An unknown device type or strategy, or an amount that is not positive.
    """

    device: str | None = None
    cpus: float = 1
    strategy: str = "PACK"
    extra: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.device is not None and self.device not in RAY_RESOURCE:
            raise ValueError(f"device={self.device!r} is not one of {', '.join(RAY_RESOURCE)}, or None")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        for name, amount in {"cpus": self.cpus, "timeout": self.timeout, **self.extra}.items():
            if not amount > 0:
                raise ValueError(f"{name}={amount} must be greater than 0")

    def accelerator(self, cluster: Mapping[str, float]) -> str:
        """Return the Ray resource of a rank's device: the resource of `device`, or the first that the cluster has."""
        if self.device is not None:
            return RAY_RESOURCE[self.device]
        return next(name for name in RAY_RESOURCE.values() if cluster.get(name) or name == "CPU")

    def bundle(self, accelerator: str) -> dict[str, float]:
        """Return the amounts of Ray's resources that one rank takes."""
        device = {} if accelerator == "CPU" else {accelerator: 1.0}
        return {"CPU": float(self.cpus), **device, **self.extra}


def import_ray() -> ModuleType:
    """Import and return Ray; raise ValueError where the extra `rl-train[ray]` is not installed."""
    try:
        import ray
    except ImportError:
        raise ValueError("RayModelGroup needs Ray, which is not installed: pip install 'ray>=2.50'") from None
    return ray


def connected_ray() -> ModuleType:
    """Return Ray, connected to the cluster of RAY_ADDRESS, to one that `ray start` has begun here, or to a new one.

    A new cluster listens on the loopback device alone: anyone who reaches a cluster can run programs on it.

    Raises:
        ValueError: See `import_ray`.
        ConnectionError: RAY_ADDRESS names no cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "local":
        try:
            ray.init(address=address)
            return ray
        except ConnectionError:
            if address != "auto":
                raise
    from ray._private import ray_constants

    # Ray takes the loopback device by itself on macOS and Windows; this switch is read at import, and by its daemons.
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    outside = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        ray.init(address="local")
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if outside is None:
            del os.environ[name]
        else:
            os.environ[name] = outside
    return ray
