"""Ranks of the command line: results, events, failures that reach the user, and no hang."""

import os
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_train.cluster import launch
from rl_train.cluster.launch import Devices, run_on_ranks
from rl_train.processes.errors import RankFailed

from .processes.living import lives, wait_until

CPU = Devices.find("cpu")


def add_up(send: Callable[[Any], None], offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    send(("rank", dist.get_rank()))
    dist.all_reduce(value)
    return int(value)


def fail_on_rank_1(send: Callable[[Any], None], how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        raise {"mistake": ValueError, "bug": ZeroDivisionError, "disk": OSError}[how]("the reason")
    dist.barrier()


def test_results_and_events() -> None:
    events: list[Any] = []
    assert run_on_ranks(add_up, 2, 10, devices=CPU, on_event=events.append) == 21
    assert sorted(events) == [("rank", 0), ("rank", 1)]


def warn(send: Callable[[Any], None]) -> str:
    return warnings.formatwarning("a reason\x1b[2J", UserWarning, "file.py", 7)


def test_a_rank_shows_a_warning_without_its_source() -> None:
    assert run_on_ranks(warn, 1, devices=CPU) == "warning: a reason\\x1b[2J\n"


def how_torch_looks_for_cuda(send: Callable[[Any], None]) -> str | None:
    return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")


def test_the_server_that_forks_the_ranks_does_not_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    assert run_on_ranks(how_torch_looks_for_cuda, 1, devices=CPU) == "1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def is_forked_from_cuda(send: Callable[[Any], None]) -> bool:
    return torch.cuda._is_in_bad_fork()


@pytest.mark.gpu
def test_ranks_can_use_cuda_whatever_the_server_has_imported() -> None:
    assert not run_on_ranks(is_forked_from_cuda, 1)


@pytest.mark.parametrize(
    ("how", "message", "mistake"),
    [
        ("mistake", "ValueError: the reason", "the reason"),
        pytest.param("bug", "ZeroDivisionError: the reason", None, marks=pytest.mark.slow),
        ("disk", "OSError: the reason", "the reason"),
        ("exit", r"^rank 1 ended its process \(exit status 7\)$", None),
    ],
)
def test_a_failing_rank_is_reported_while_its_peer_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, how: str, message: str, mistake: str | None
) -> None:
    monkeypatch.setattr(launch, "REPORT_SECONDS", 0.3)  # the peer has nothing to report
    began = time.monotonic()
    with pytest.raises(RankFailed, match=message) as failure:
        run_on_ranks(fail_on_rank_1, 2, how, devices=CPU)
    assert failure.value.mistake == mistake
    # Starting the ranks takes most of it; a hang would take ten minutes.
    assert time.monotonic() - began < 60


def come_late_on_rank_1(send: Callable[[Any], None]) -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_a_collective_that_not_all_reach_in_time_names_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REPORT_SECONDS", 0.3)  # the late rank has nothing to report
    with pytest.raises(
        RankFailed, match="waited collective_timeout=1 seconds for a rank that did not arrive"
    ) as failure:
        run_on_ranks(come_late_on_rank_1, 2, devices=CPU, collective_timeout=1)
    assert "rank 0 failed" in str(failure.value)


def stop_on_rank_1(send: Callable[[Any], None]) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="tells by /proc which processes are stopped")
def test_a_stopped_rank_is_named_instead_of_those_that_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REPORT_SECONDS", 0.3)  # the stopped rank has nothing to report
    with pytest.raises(RankFailed, match=r"^rank 1 is stopped: process \d+ waits for SIGCONT") as failure:
        run_on_ranks(stop_on_rank_1, 2, devices=CPU, collective_timeout=1)
    assert failure.value.mistake is None


LAUNCHER = """
import os, time
import torch
import torch.distributed as dist
from rl_train.cluster.fork_server import prepare
from rl_train.cluster.launch import Devices, run_on_ranks

def work(send, folder):
    with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
        file.write(f"{os.getpid()} {os.getppid()} {torch.get_num_threads()}")
    if dist.get_rank() == 0:
        dist.barrier()  # waits for rank 1; the others are done or asleep
    while dist.get_rank() == 1:
        time.sleep(60)

if __name__ == "__main__":
    prepare("rl_train.cluster.launch")  # the server imports torch, not each rank
    run_on_ranks(work, 3, os.getcwd(), devices=Devices.find("cpu"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="tells by /proc which processes live")
def test_ranks_keep_the_users_number_of_threads_and_end_with_a_killed_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHER)
    launcher = subprocess.Popen([sys.executable, script], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "2"})
    files = [tmp_path / str(rank) for rank in range(3)]
    wait_until(lambda: all(file.is_file() and " " in file.read_text() for file in files))
    numbers = [[int(word) for word in file.read_text().split()] for file in files]
    assert [threads for _, _, threads in numbers] == [2, 2, 2], "the user's OMP_NUM_THREADS is kept"
    processes = {process for *pair, _ in numbers for process in pair}
    assert len(processes) == 3 + 1  # the ranks and the server that forked them
    assert all(lives(process) for process in processes)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: not any(lives(process) for process in processes))


INTERRUPTED = """
import os, pathlib, signal, time
from multiprocessing.forkserver import _forkserver as server
from rl_train.cluster.fork_server import prepare

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it, and their children
prepare("slow")
while not pathlib.Path("importing").exists():
    time.sleep(0.01)
os.kill(server._forkserver_pid, signal.SIGINT)
pathlib.Path("interrupted").touch()
signal.raise_signal(signal.SIGINT)
"""

SLOW = """
import pathlib, time
pathlib.Path("importing").touch()
while not pathlib.Path("interrupted").exists():
    time.sleep(0.01)
"""


def test_ctrl_c_while_the_server_imports_prints_nothing(tmp_path: Path) -> None:
    """A terminal sends it to all processes; the launcher alone answers."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "script.py").write_text(INTERRUPTED)
    command = [sys.executable, "script.py"]
    # This returns once the server, too, has closed its end of stderr.
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr.count("KeyboardInterrupt") == 1
    assert "slow.py" not in ended.stderr
    assert "raise_signal" in ended.stderr


def test_devices_are_checked() -> None:
    with pytest.raises(ValueError, match="must be cpu or cuda"):
        Devices.find("tpu")
    with pytest.raises(ValueError, match="2 ranks need as many CUDA devices, found 1"):
        run_on_ranks(add_up, 2, 0, devices=Devices("cuda", "nccl", 1))


@pytest.mark.parametrize("asked", [None, "npu"])
def test_any_accelerator_of_torch_is_found(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(dist, "get_default_backend_for_device", {"npu": "hccl"}.__getitem__)
    devices = Devices.find(asked)
    assert devices == Devices("npu", "hccl", 4)
    assert Devices.find("cpu") == CPU
    with pytest.raises(ValueError, match="5 ranks need as many NPU devices, found 4"):
        devices.require(5)
    with pytest.raises(ValueError, match="device 'GPU-3f2a' is not among the 4 npu devices"):
        devices.take("GPU-3f2a")
    monkeypatch.setattr(torch, "device", lambda *device: device)
    assert devices.take("3") == ("npu", 3)
    # What a process sees alone is its own, whatever its number on the machine.
    assert Devices("npu", "hccl", 1).take("3") == ("npu", 0)
    assert taken == [3, 0]


def test_an_accelerator_without_collectives_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert Devices.find() == CPU
    assert Devices.find("mps") == Devices("mps", "gloo", 1)
