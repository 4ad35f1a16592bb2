"""Shared code of the benchmarks: fair timing, peak memory, the machine's ceilings, ranks, and tables.

On a machine without a GPU everything runs on the CPU, with gloo: to see that a benchmark works, not to learn a time.
"""

import contextlib
import datetime
import functools
import gc
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Call = Callable[[], Any]
HEAD_START = 4_000_000  # clock cycles: about two milliseconds


def join_ranks() -> tuple[int, int]:
    """(rank, world size): joins the process group that torchrun describes; (0, 1) without torchrun."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if CUDA else "gloo", timeout=datetime.timedelta(minutes=5))
    return rank, world


def synchronize() -> None:
    """Wait for the device, and for every rank."""
    if CUDA:
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def milliseconds(call: Call) -> float:
    """Time one call by CUDA events, with a head start for the host, as it has inside a model's step.

    The device sleeps while the host queues the call, so that a launch that can hide behind the device's work does, and
    then reads what fills its cache several times, so that no call finds there what the call before it used: what others
    rotate buffers for.
    """
    if not CUDA:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    _elsewhere().sum()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@functools.cache
def _elsewhere() -> torch.Tensor:
    size = 4 * torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return torch.zeros(size // 4, device=DEVICE)


def peak_gib(call: Call) -> float:
    """The most memory that a call holds above what was held before it, in GiB; 0 on a CPU."""
    gc.collect()
    if not CUDA:
        call()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


@dataclass
class Timing:
    """One variant's times of all rounds, in milliseconds; `failed` says why there are none."""

    name: str
    times: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def median(self) -> float:
        """NaN where it failed."""
        return statistics.median(self.times) if self.times else float("nan")


def side_by_side(calls: Mapping[str, Call], *, rounds: int = 15, warm_up: int = 3) -> dict[str, Timing]:
    """Time every variant once a round, so that a clock that drifts drifts for all; with ranks, the slowest rank counts.

    Each round has an order of its own, the same on all ranks: a GPU at its power limit is slower after what has cost it
    much power.

    A variant that raises is left out and says so on standard error; with several ranks it ends the benchmark instead,
    since the others would wait for it.
    """
    timings = {name: Timing(name) for name in calls}
    for name, call in calls.items():
        try:
            for _ in range(warm_up):
                call()
            synchronize()
        except Exception as error:
            if dist.is_initialized():
                raise
            timings[name].failed = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            print(f"{name}: {timings[name].failed}", file=sys.stderr)
    running = [name for name in calls if not timings[name].failed]
    orders = random.Random(0)
    for _ in range(rounds):
        for name in orders.sample(running, len(running)):
            synchronize()
            timings[name].times.append(_slowest(milliseconds(calls[name])))
    return timings


def _slowest(value: float) -> float:
    if not dist.is_initialized():
        return value
    worst = torch.tensor(value, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def ceilings() -> dict[str, float]:
    """Return the rates of a large bf16 GEMM and a device-to-device copy (bytes read and written); {} on a CPU."""
    if not CUDA:
        return {}
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = side_by_side({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds=20)
    return {
        "product_tflops": 2 * 8192**3 / times["product"].median * 1e-9,
        "copy_tb_per_s": 2 * source.nbytes / times["copy"].median * 1e-9,
    }


def kernel_packages() -> dict[str, str]:
    """Import the packages of recurrent kernels that are installed, and return their versions.

    mamba_ssm imports its CUDA extension, which Mamba-2 does not use: these kernels are Triton's. A wheel without the
    extension gets an empty module in its place. transformers takes a package that it cannot import for a missing one,
    so call this function before transformers loads a model's code.
    """
    versions = {}
    for name in ("fla", "causal_conv1d", "mamba_ssm"):
        if name == "mamba_ssm" and importlib.util.find_spec("selective_scan_cuda") is None:
            sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))
        with contextlib.suppress(ImportError):
            versions[name] = importlib.import_module(name).__version__
    return versions


def machine() -> dict[str, Any]:
    """Date, device and versions, for the head of a report."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table; floats with three significant digits, NaN as a dash."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "-" if value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return str(value)

    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(lines)


def rl_train(folder: Path, command: str, *words: str) -> None:
    """Run a command of rl-train in the folder of an example, whose modules it imports."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-m", "rl_train", command, *words], check=True, cwd=folder, env=environment)


def flags(values: Mapping[str, Any]) -> list[str]:
    """Return options of a command with their values."""
    return [f"--{option}={value}" for option, value in values.items()]


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run of rl-train: of the evaluation before step 1, and of its steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_json(path: str | None, **report: Any) -> None:
    """Write a report with the machine's description; dataclasses become objects. Nothing without a path."""
    if path is None:
        return
    with open(path, "w") as file:
        json.dump({"machine": machine(), **report}, file, indent=1, default=asdict)
