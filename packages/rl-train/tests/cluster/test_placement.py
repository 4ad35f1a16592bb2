"""Placement on two nodes of a real Ray cluster; its GPUs are counted by Ray alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_layers import ParallelDims
from rl_models import Actor
from rl_train import Placement, RayModelGroup, Resources
from rl_train.cluster.group import GROUP_METHODS
from rl_train.cluster.ranks import Ranks

CPU = {"device": "cpu", "timeout": 20.0}


def nothing_is_leased() -> bool:
    """Whether Ray soon has all CPUs and GPUs back; it takes them back a moment after a placement has been removed."""
    import ray

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        total, free = ray.cluster_resources(), ray.available_resources()
        if all(free.get(name) == total[name] for name in ("CPU", "GPU")):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("strategy", "devices", "nodes"), [("PACK", 3, 1), ("STRICT_PACK", 3, 1), ("SPREAD", 2, 2), ("PACK", 5, 2)]
)
def test_strategies(ray_cluster: Any, strategy: str, devices: int, nodes: int) -> None:
    with Placement(devices, Resources(strategy=strategy, **CPU)) as placement:
        assert len(set(placement.wait())) == nodes


@pytest.mark.parametrize(("strategy", "devices"), [("STRICT_PACK", 5), ("STRICT_SPREAD", 3), ("PACK", 9)])
def test_no_room_is_an_error(ray_cluster: Any, strategy: str, devices: int) -> None:
    with pytest.raises(ValueError, match=rf"{devices} x {{'CPU': 1.0}} with strategy {strategy} found no room.*4 CPU"):
        Placement(devices, Resources(device="cpu", strategy=strategy, timeout=0.5))
    assert nothing_is_leased()


@pytest.mark.slow
def test_groups_share_devices_by_fractions(ray_cluster: Any) -> None:
    with pytest.raises(ValueError, match="devices=3 are no multiple of per_bundle=2"):
        Placement(3, per_bundle=2)
    with Placement(4, Resources(strategy="SPREAD", timeout=60.0)) as placement:
        assert placement.accelerator == "GPU"
        taken = [placement.share(fraction).take(count, [2]) for count, fraction in ((4, 0.5), (2, 0.5))]
        # Both pairs of neighbours are on one node each, and the second group is where the first one is.
        nodes = placement.wait()
        assert [nodes[bundle] for bundle in taken[0]][::2] == [nodes[bundle] for bundle in taken[0]][1::2]
        assert taken[1] == taken[0][:2]
        assert placement.share(0.5).take(2, [2]) == taken[0][2:]
        with pytest.raises(ValueError, match=r"1 ranks need 0.25 of a device each.* have 0, 0, 0, 0 left"):
            placement.share(0.25).take(1, [1])
        placement.share(0.5).give_back(taken[1])
        with pytest.raises(ValueError, match=r"fraction=1.5 must lie in \(0, 1\]"):
            placement.share(1.5)

        # Processes on one node: the numbers of their devices.
        groups = [Ranks(f"group {n}", placement.share(0.5), taken[1], [2], 60.0, GROUP_METHODS) for n in range(2)]
        try:
            seats = [[(seat.node, seat.device) for seat in group.seats] for group in groups]
        finally:
            for group in groups:
                group.end()
        assert seats[0] == seats[1] == [(nodes[taken[1][0]], "0"), (nodes[taken[1][0]], "1")]


@pytest.mark.slow
def test_a_device_that_torch_can_not_use_is_named(ray_cluster: Any, checkpoint: Path) -> None:
    if torch.accelerator.device_count():
        pytest.skip("there is a device here")
    with pytest.raises(ValueError, match=r"Ray gave this rank a GPU, but torch .* cannot use it"):
        RayModelGroup(Actor, ParallelDims(), checkpoint, resources=Resources(device="cuda"))
    assert nothing_is_leased()
