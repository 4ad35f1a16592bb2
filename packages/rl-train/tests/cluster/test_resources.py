"""Resources, the order of ranks, their environment and a missing Ray, without a cluster."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, strategies as st

from parallel_layers import ParallelDims
from rl_models import Actor
from rl_train import RayModelGroup, Resources
from rl_train.cluster import resources
from rl_train.cluster.addresses import address_towards, interface_of, listen_on
from rl_train.cluster.host import Seat
from rl_train.cluster.placement import node_runs, rank_order
from rl_train.cluster.ranks import rank_environments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device='tpu' is not one of cuda, xpu, npu, hpu, cpu, or None"),
        ({"strategy": "TIGHT"}, "strategy='TIGHT' is not one of PACK, STRICT_PACK, SPREAD, STRICT_SPREAD"),
        ({"cpus": 0}, "cpus=0 must be greater than 0"),
        ({"extra": {"rack": -1.0}}, "rack=-1.0 must be greater than 0"),
    ],
)
def test_a_mistake_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resources(**options)


@pytest.mark.parametrize(
    ("device", "cluster", "accelerator", "bundle"),
    [
        (None, {"CPU": 8.0}, "CPU", {"CPU": 2.0}),
        (None, {"CPU": 8.0, "GPU": 4.0}, "GPU", {"CPU": 2.0, "GPU": 1.0}),
        (None, {"CPU": 8.0, "GPU": 0.0, "NPU": 4.0}, "NPU", {"CPU": 2.0, "NPU": 1.0}),
        ("cpu", {"CPU": 8.0, "GPU": 4.0}, "CPU", {"CPU": 2.0}),
        ("xpu", {"CPU": 8.0}, "GPU", {"CPU": 2.0, "GPU": 1.0}),
    ],
)
def test_one_resolver_for_all_devices(
    device: str | None, cluster: dict[str, float], accelerator: str, bundle: dict[str, float]
) -> None:
    resources = Resources(device=device, cpus=2, extra={"rack": 0.5})
    assert resources.accelerator(cluster) == accelerator
    assert resources.bundle(accelerator) == {**bundle, "rack": 0.5}


def test_ranks_are_sorted_by_node_and_device() -> None:
    seats = [("b", "1"), ("a", "10"), ("b", "0"), ("a", "9")]
    assert [seats[i] for i in rank_order(seats, [2])] == [("a", "9"), ("a", "10"), ("b", "0"), ("b", "1")]
    # A node with one device between the others would tear their pairs apart.
    seats = [("a", ""), ("b", ""), ("b", ""), ("c", ""), ("c", ""), ("d", "")]
    assert [seats[i][0] for i in rank_order(seats, [2])] == ["b", "b", "c", "c", "a", "d"]


def test_replicas_lie_inside_nodes_and_tp_groups_where_a_replica_finds_no_node() -> None:
    assert node_runs(ParallelDims(dp=4, pp=2, cp=2, tp=2, replicate=2)) == [8, 2]
    assert node_runs(ParallelDims(dp=4, tp=2)) == [2]
    # Replicas of four ranks, tp groups of two: the node of six would tear a replica of the nodes behind it.
    seats = [(f"{size}{node}", str(device)) for size, node in ((6, "a"), (5, "b"), (4, "c")) for device in range(size)]
    assert [seats[i][0] for i in rank_order(seats, [4, 2])] == ["4c"] * 4 + ["6a"] * 6 + ["5b"] * 5


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.sampled_from([1, 2, 4]), st.randoms())
def test_no_tp_group_is_torn_that_fits_a_node(sizes: list[int], tp: int, random: Any) -> None:
    seats = [(f"node{n}", str(device)) for n, size in enumerate(sizes) for device in range(size)]
    random.shuffle(seats)
    order = rank_order(seats, [tp])
    assert sorted(order) == list(range(len(seats)))
    nodes = [seats[i][0] for i in order]
    whole = sum(len(set(nodes[first : first + tp])) == 1 for first in range(0, len(nodes) - tp + 1, tp))
    # Nodes of whole tp groups come first and lose none; of the others, the largest loses none.
    certain = sum(size // tp for size in sizes if size % tp == 0)
    certain += max((size // tp for size in sizes if size % tp), default=0)
    assert whole >= certain


def test_the_environment_is_torchruns() -> None:
    seats = [Seat(node, f"10.0.0.{i}", "", 5000 + i, i) for i, node in enumerate("aab")]
    found = rank_environments(seats)
    assert [(env["RANK"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) for env in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert {(env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found} == {("3", "10.0.0.0", "5000")}


def test_the_interface_of_an_address() -> None:
    if sys.platform == "linux":
        assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.255") is None
    assert interface_of("::1") is None


def test_the_address_that_leads_to_a_host() -> None:
    assert address_towards("127.0.0.1", 80) == address_towards("localhost", 80) == "127.0.0.1"


def test_a_rank_listens_on_the_address_of_its_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_on("127.0.0.1") as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises((ConnectionError, TimeoutError)):
            socket.create_connection(("127.0.0.2", port), timeout=5)

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    message = r"192\.0\.2\.255, is not one that a process can listen on here \(Cannot assign.*; start Ray with"
    with pytest.raises(ValueError, match=message):
        listen_on("192.0.2.255")


def test_the_host_of_a_rank_is_imported_without_torch() -> None:
    pytest.importorskip("ray")
    code = (
        "import os, sys; from rl_train.cluster.host import RankHost; host = RankHost('CPU'); "
        "assert host._listener.getsockname()[0] == host._address; "
        "host.prepare({'RANK': '1'}, 1.0); "
        "print('torch' in sys.modules, os.environ['RANK'], repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "False 1 ''\n"


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs Ray, which is not installed: pip install 'ray>=2.50'"):
        RayModelGroup(Actor, ParallelDims(), "checkpoint")


class NoCluster:
    """Stands for Ray where `clusters` are the addresses that answer; `started` are those of `init`."""

    def __init__(self, *clusters: str) -> None:
        self.clusters, self.started = clusters, list[tuple[str, bool, str | None]]()

    def is_initialized(self) -> bool:
        return bool(self.started)

    def init(self, address: str) -> None:
        if address not in self.clusters:
            raise ConnectionError(f"no cluster at {address}")
        constants = pytest.importorskip("ray._private.ray_constants", reason="needs the extra rl-train[ray]")
        self.started.append((address, constants.ENABLE_RAY_CLUSTER, os.environ.get(SWITCH)))


SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.mark.parametrize(
    ("environment", "clusters", "started"),
    [
        (None, ["auto", "local"], ("auto", True, None)),
        (None, ["local"], ("local", False, "0")),
        ("local", ["auto", "local"], ("local", False, "0")),
        ("head:6379", ["head:6379", "auto", "local"], ("head:6379", True, None)),
        ("head:6379", ["auto", "local"], None),
    ],
)
def test_only_a_new_cluster_listens_on_the_loopback_device_alone(
    monkeypatch: pytest.MonkeyPatch,
    environment: str | None,
    clusters: list[str],
    started: tuple[str, bool, str | None] | None,
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    ray = NoCluster(*clusters)
    monkeypatch.setattr(resources, "import_ray", lambda: ray)
    if started is None:
        with pytest.raises(ConnectionError, match="no cluster at head:6379"):
            resources.connected_ray()
        return
    for _ in range(2):
        assert resources.connected_ray() is ray
        assert ray.started == [started]
        assert SWITCH not in os.environ


LISTENING = """
import os, psutil, ray
from rl_train import Placement, Resources

with Placement(1, Resources(device="cpu")):
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    for socket in psutil.net_connections("tcp"):
        if socket.status == "LISTEN" and socket.pid is not None:
            if session in " ".join(psutil.Process(socket.pid).cmdline()) or socket.pid == os.getpid():
                print(socket.laddr.ip)
"""


@pytest.mark.slow
def test_nobody_else_reaches_a_cluster_that_we_start() -> None:
    pytest.importorskip("ray", reason="needs the extra rl-train[ray]")
    pytest.importorskip("psutil")
    environment = os.environ | {"RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 3
    assert {address.removeprefix("::ffff:") for address in done.stdout.split()} == {"127.0.0.1"}
