"""The table of a traced step, from traces with known times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rl_train.report.phase_table import phase_rows, write_tables


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


PHASES = [
    event("user_annotation", "phase: generating", 0, 1000),
    event("user_annotation", "phase: learning", 1000, 3000),
    event("user_annotation", "phase: generating", 5000, 500),
    {"ph": "f", "name": "an arrow", "ts": 5},
]


def test_kernels_belong_to_the_phase_that_launched_them() -> None:
    events = [
        *PHASES,
        event("cuda_runtime", "cudaLaunchKernel", 900, 5, correlation=1),
        event("kernel", "decode", 1100, 400, correlation=1),  # runs when its phase is over
        event("cuda_runtime", "cudaLaunchKernel", 1200, 5, correlation=2),
        event("kernel", "gemm", 1500, 1000, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 1300, 5, correlation=3),
        event("gpu_memcpy", "Memcpy DtoH", 2000, 1000, correlation=3),  # beside the GEMM for 500
        event("cuda_runtime", "cudaStreamSynchronize", 2500, 1400, correlation=4),
        event("cuda_runtime", "cudaDeviceSynchronize", 4500, 100, correlation=5),
        event("cpu_op", "aten::mm", 1200, 50),
    ]
    generating, learning = phase_rows(events)
    assert (generating.name, learning.name) == ("generating", "learning")
    assert (generating.seconds, learning.seconds) == pytest.approx((1500e-6, 3000e-6))
    assert (generating.kernels, learning.kernels) == pytest.approx((400e-6, 1500e-6))
    assert (generating.waits, learning.waits) == pytest.approx((0, 1400e-6))
    assert dict(generating.top) == pytest.approx({"decode": 400e-6})
    assert dict(learning.top) == pytest.approx({"gemm": 1000e-6, "Memcpy DtoH": 1000e-6})


def test_without_a_device_operators_count_by_their_own_time() -> None:
    events = [
        *PHASES,
        event("cpu_op", "aten::linear", 1000, 100),
        event("cpu_op", "aten::mm", 1010, 60),
        event("cpu_op", "aten::copy_", 1020, 10),
        event("cpu_op", "aten::mm", 1080, 20),
        event("cpu_op", "aten::mm", 1030, 500, tid=2),
        event("user_annotation", "gloo:all_gather", 1600, 300, tid=3),
        event("cpu_op", "aten::sum", 4500, 7),
    ]
    generating, learning, other = phase_rows(events)
    assert generating.top == ()
    assert [(name, round(time * 1e6)) for name, time in learning.top] == [
        ("aten::mm", 50 + 20 + 500), ("aten::linear", 20), ("aten::copy_", 10),
    ]  # fmt: skip
    assert learning.waits == pytest.approx(300e-6)
    assert (other.name, other.seconds) == ("other", 0)
    assert dict(other.top) == pytest.approx({"aten::sum": 7e-6})


def test_each_rank_has_a_table(tmp_path: Path) -> None:
    for rank in (0, 3):
        with gzip.open(tmp_path / f"rank-{rank}.json.gz", "wt") as file:
            json.dump({"traceEvents": [*PHASES, event("cpu_op", "a|b", 1000, 2000)]}, file)
    text = write_tables(tmp_path, 7).read_text()
    assert text.startswith("# Step 7 by phase\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## rank-0.json.gz", "## rank-3.json.gz"]
    assert text.count("| learning | 0.003 | 0.000 | 0.000 | a/b 0.002 s |") == 2
