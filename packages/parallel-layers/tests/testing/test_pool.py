"""The rank pool itself: results, errors, hangs, deaths, clean-up."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_layers.testing import RankDied, RankPool, RankTimeout, fork_server, run_ranks, shared_pool
from parallel_layers.testing.pool import _server, _servers


@dataclass
class Scale:
    factor: float


class OddError(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"odd {a} {b}")


def sum_of_ranks(group: ProcessGroup, scale: Scale, *, offset: float = 0.0) -> torch.Tensor:
    x = torch.full((2,), group.rank() * scale.factor + offset, requires_grad=True)
    y = x * 1
    dist.all_reduce(y.detach(), group=group)
    return y


def world_of(group: ProcessGroup) -> tuple[int, int, int]:
    return group.rank(), group.size(), dist.get_world_size()


def process_id(group: ProcessGroup) -> int:
    return os.getpid()


def first_draw(group: ProcessGroup) -> torch.Tensor:
    return torch.rand(3)


def view_of_a_large_tensor(group: ProcessGroup) -> torch.Tensor:
    return torch.zeros(1000, 1000)[0]


def there_and_back(group: ProcessGroup, tensors: dict[torch.dtype, torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    assert all(tensor.dtype == dtype for dtype, tensor in tensors.items())
    return tensors


def raise_on(group: ProcessGroup, rank: int | None) -> None:
    if rank is None or group.rank() == rank:
        raise ValueError(f"bad value on {group.rank()}")
    dist.barrier(group)


def raise_odd(group: ProcessGroup) -> None:
    raise OddError(1, 2)


def hang_on_rank_one(group: ProcessGroup) -> None:
    if group.rank() == 1:
        time.sleep(1000)


def die_on_rank_one(group: ProcessGroup) -> None:
    if group.rank() == 1:
        os._exit(3)
    dist.barrier(group)


def start_a_pool(group: ProcessGroup) -> None:
    RankPool(2)


def is_alive(pid: int) -> bool:
    # A zombie's parent is gone too: init reaps it at its leisure.
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_rank_order_detached(ranks: RankPool, world: int) -> None:
    results = ranks.run(sum_of_ranks, Scale(2.0), world=world, offset=1.0)
    total = sum(2.0 * rank + 1.0 for rank in range(world))
    assert [r.tolist() for r in results] == [[total, total]] * world
    assert not any(r.requires_grad for r in results)


def test_the_group_is_exactly_the_ranks_asked_for(ranks: RankPool) -> None:
    assert ranks.run(world_of, world=2) == [(0, 2, 4), (1, 2, 4)]
    assert ranks.run(world_of) == [(rank, 4, 4) for rank in range(4)]


def test_the_processes_are_reused_and_reseeded(ranks: RankPool) -> None:
    assert ranks.run(process_id) == ranks.run(process_id)
    torch.testing.assert_close(ranks.run(first_draw), ranks.run(first_draw), rtol=0, atol=0)


def test_a_view_does_not_carry_its_storage(ranks: RankPool) -> None:
    (row,) = ranks.run(view_of_a_large_tensor, world=1)
    assert row.untyped_storage().nbytes() == 4000


def bits(x: torch.Tensor) -> torch.Tensor:
    x = torch.view_as_real(x) if x.dtype == torch.complex128 else x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype_go_there_and_back(ranks: RankPool) -> None:
    """Strided, with no dim, and empty. (Of quantized tensors torch has only some, and gives them up.)"""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes = {dtype for dtype in dtypes if not str(dtype).startswith(("torch.qint", "torch.quint"))}
    assert {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool} < dtypes
    numbers = torch.arange(256, dtype=torch.uint8).remainder(2).view(4, 64)
    matrices = {dtype: numbers.view(dtype).t() for dtype in dtypes}
    for tensors in (
        matrices,
        {dtype: matrix[0, 0] for dtype, matrix in matrices.items()},
        {dtype: matrix[:0] for dtype, matrix in matrices.items()},
    ):
        for back in ranks.run(there_and_back, tensors, world=2):
            assert back.keys() == tensors.keys()
            for dtype, tensor in tensors.items():
                assert back[dtype].dtype == dtype
                assert back[dtype].shape == tensor.shape
                assert torch.equal(bits(back[dtype]), bits(tensor))


def gradient_flags(group: ProcessGroup, *tensors: torch.Tensor) -> list[tuple[bool, bool]]:
    return [(isinstance(t, torch.nn.Parameter), t.requires_grad) for t in tensors]


def test_arguments_keep_whether_they_need_a_gradient(ranks: RankPool) -> None:
    tensors = [
        torch.zeros(2, requires_grad=True),
        torch.zeros(2).to(torch.float8_e5m2).requires_grad_(),
        torch.nn.Parameter(torch.zeros(2).to(torch.float8_e5m2)),
        torch.nn.Parameter(torch.zeros(2, dtype=torch.uint16), requires_grad=False),
    ]
    expected = [(False, True), (False, True), (True, True), (True, False)]
    assert ranks.run(gradient_flags, *tensors, world=1) == [expected]


def test_an_exception_keeps_type_and_traceback_and_the_pool_lives_on(ranks: RankPool) -> None:
    before = ranks.run(process_id)
    with pytest.raises(ValueError, match="bad value on 0") as caught:
        ranks.run(raise_on, None, world=2)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 0:" in notes
    assert "on rank 1:" in notes
    assert "in raise_on" in notes
    assert ranks.run(process_id) == before


def test_an_exception_that_cannot_be_pickled_shows_its_text(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="OddError: odd 1 2"):
        ranks.run(raise_odd, world=2)


def test_only_top_level_functions(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="top level of a file"):
        ranks.run(lambda group: None)
    with pytest.raises(ValueError, match=r"world=5 is outside this pool's 1\.\.4 ranks"):
        ranks.run(world_of, world=5)


def test_failures_that_cost_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_layers.testing.pool._GRACE_SECONDS", 0.2)
    with RankPool(2) as pool:
        first = pool.run(process_id)
        with pytest.raises(ValueError, match="bad value on 1"):
            pool.run(raise_on, 1)
        start = time.monotonic()
        with pytest.raises(RankTimeout, match=r"rank\(s\) \[1\] of 2 did not return within 1 s") as caught:
            pool.run(hang_on_rank_one, timeout=1)
        assert "hang_on_rank_one" in str(caught.value)
        assert time.monotonic() - start < 60
        with pytest.raises(RankDied, match="rank 1 ended"):
            pool.run(die_on_rank_one)
    assert wait_until_gone(first)


def test_ranks_start_no_ranks(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="a rank may not start ranks"):
        ranks.run(start_a_pool, world=1)


def test_a_file_that_cannot_be_imported_by_its_name(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest's own test modules: their functions are found, and results of their classes come back."""
    file = tmp_path / "far.py"
    file.write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Place:\n    rank: int\n"
        "def place(group, add):\n    return Place(group.rank() + add.rank)\n"
    )
    for name in ("no-where", "no-where.at"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = importlib.util.spec_from_file_location("no-where.at.all", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert ranks.run(module.place, module.Place(5), world=2) == [module.Place(5), module.Place(6)]


SCRIPT = """
import os
from parallel_layers.testing import RankPool, fork_server

def pid(group):
    return os.getpid()

if __name__ == "__main__":
    {start}
    pool = RankPool(2)
    print(*pool.run(pid), flush=True)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["pass", "fork_server()"])
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"])
def test_no_rank_outlives_the_process_that_started_it(tmp_path: os.PathLike[str], start: str, end: str) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(SCRIPT.format(start=start, end=end))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert wait_until_gone(pids)


@pytest.mark.gpu(2)
def test_nccl_ranks_have_a_device_each() -> None:
    assert run_ranks(device_sum, 2, backend="nccl") == [(0, 1.0), (1, 1.0)]


def device_sum(group: ProcessGroup) -> tuple[int, float]:
    x = torch.tensor(float(group.rank()), device="cuda")
    dist.all_reduce(x, group=group)
    return torch.cuda.current_device(), x.item()


def form_groups(group: ProcessGroup, count: int) -> tuple[int, int]:
    """The rank's process, and how many threads it had before."""
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(count):
        dist.new_group(list(range(group.size())))
    return os.getpid(), threads


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads, which needs /proc")
def test_ranks_that_formed_many_groups_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_layers.testing.pool._MOST_GROUPS", 20)
    with RankPool(2) as pool:
        (first, few), _ = pool.run(form_groups, 12)
        (same, more), _ = pool.run(form_groups, 12)
        assert same == first
        assert more >= few + 12
        assert pool.run(form_groups, 12)[0] != (first, few)
        for _ in range(2):
            _, threads = pool.run(form_groups, 12)[0]
            assert threads <= more


def loaded(group: ProcessGroup, name: str) -> bool:
    return name in sys.modules


def test_a_package_to_preload_is_imported_as_far_as_the_caller_has_imported_it() -> None:
    importlib.import_module("wsgiref.headers")
    with RankPool(1) as plain, RankPool(1, preload=["wsgiref"]) as preloaded:
        assert plain.run(loaded, "wsgiref.headers") == [False]
        assert preloaded.run(loaded, "wsgiref.headers") == [True]
        assert preloaded.run(loaded, "wsgiref.simple_server") == [False]


def test_the_shared_pool_has_the_packages_of_all_calls(ranks: RankPool) -> None:
    importlib.import_module("colorsys")
    first = ranks.run(process_id)
    assert shared_pool() is shared_pool("transformers") is ranks
    assert ranks.run(process_id) == first
    assert shared_pool("colorsys") is ranks
    assert ranks.run(loaded, "colorsys") == [True] * 4
    assert ranks.run(process_id) != first
    assert "transformers" in ranks.preload


def test_the_ranks_are_forked_from_one_process_that_has_the_callers_imports() -> None:
    server = _server("gloo").process.pid
    importlib.import_module("hypothesis")
    for _ in range(2):
        assert run_ranks(loaded, 2, "hypothesis") == [True, True]
        assert _server("gloo").process.pid == server
    if os.path.isdir("/proc"):
        threads = [path.read_text().strip() for path in Path(f"/proc/{server}/task").glob("*/comm")]
        assert len(threads) == 1, f"a process with several threads does not fork safely: {threads}"


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has used torch")
def test_a_forked_server_has_what_the_caller_has_in_memory_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_servers, "gloo", raising=False)
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    fork_server()
    server = _server("gloo")
    fork_server()
    assert _server("gloo") is server
    with RankPool(2) as pool:
        assert pool.run(loaded, "made_up") == [True, True]
        processes = pool.run(process_id)
        assert server.process.poll() is None
        server._connection.close()
        assert wait_until_gone([server.process.pid, *processes])
        assert server.process.wait() == server.process.poll() == 0


@pytest.mark.slow
def test_a_new_process_takes_the_place_of_one_that_was_killed() -> None:
    with RankPool(2) as pool:
        first = pool.run(process_id)
        os.kill(_server("gloo").process.pid, signal.SIGKILL)
        assert pool.run(process_id) == first
    assert wait_until_gone(first)
    assert len(run_ranks(process_id, 2)) == 2


def visible_devices(group: ProcessGroup) -> int:
    return torch.cuda.device_count()


@pytest.mark.gpu
def test_ranks_on_gloo_see_no_gpu() -> None:
    """So that no import of theirs can start CUDA before the fork, after which it would not work."""
    assert run_ranks(visible_devices, 2) == [0, 0]


def environment(group: ProcessGroup) -> tuple[str | None, str]:
    return os.environ.get("A_TEST_OF_THE_POOL"), os.getcwd()


def test_new_ranks_see_the_callers_environment_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_ranks(environment, 1) == [(None, os.getcwd())]
    monkeypatch.setenv("A_TEST_OF_THE_POOL", "yes")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(environment, 1) == [("yes", str(tmp_path))]
