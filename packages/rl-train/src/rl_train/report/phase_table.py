"""`phase_rows`: what a trace of one step says of each phase: seconds, kernels, host waits, the top operators."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

# The prefix of the annotation of a phase in a trace.
PHASE = "phase: "
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
# The ends of the kinds of calls that launch kernels, behind the type of device.
_LAUNCHES = ("_runtime", "_driver")
# Runtime calls in which the host waits for the device, and annotations of collectives of gloo.
_WAITS = ("Synchronize", "gloo:")
_TOP = 3
_COVERED = """Kernels: time in which the device works on kernels that the phase launched.
Host waits: time in which a thread waits for the device, or for other ranks in a collective of gloo.
Operators: kernels; on a CPU the operators of torch, without the operators inside them.

A trace covers the threads of its rank. Engines, rewards and environments in other processes show as time without
operators. Open a trace at https://ui.perfetto.dev.
"""


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a traced step, in seconds.

    Attributes:
        name: The name of the phase; "other" for the time between phases.
        seconds: The time of the phase.
        kernels: The time in which the device works on kernels that the phase launched.
        waits: The time in which a thread of the host waits.
        top: The operators that take most time, with their seconds.
    """

    name: str
    seconds: float
    kernels: float
    waits: float
    top: tuple[tuple[str, float], ...]


def phase_rows(events: Iterable[Mapping[str, Any]]) -> list[PhaseRow]:
    """Return the phases of the events of a trace in Chrome's format, in the order of their beginnings."""
    complete = [event for event in events if event.get("ph") == "X"]
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in complete if _is_phase(e))
    starts = [start for start, _, _ in spans]

    def phase_at(time: float) -> str:
        index = bisect_right(starts, time) - 1
        return spans[index][2].removeprefix(PHASE) if index >= 0 and time < spans[index][1] else "other"

    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in complete
        if _kind(e).endswith(_LAUNCHES) and "correlation" in e["args"]
    }
    seconds = defaultdict[str, float](float)
    for start, end, name in spans:
        seconds[name.removeprefix(PHASE)] += end - start
    kernels, waits, threads = (defaultdict[str, list[Any]](list) for _ in range(3))
    tops: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in complete:
        start, end = event["ts"], event["ts"] + event["dur"]
        if _kind(event) in _KERNELS:
            phase = phase_at(launches.get(event["args"].get("correlation"), start))
            kernels[phase].append((start, end))
            tops[phase][event["name"]] += event["dur"]
        elif any(part in event["name"] for part in _WAITS):
            waits[phase_at(start)].append((start, end))
        elif _kind(event) == "cpu_op":
            threads[str(event.get("tid"))].append((start, -end, event["name"]))
    if not kernels:
        for operators in threads.values():
            for start, name, own in _own_times(sorted(operators)):
                tops[phase_at(start)][name] += own
    names = [*dict.fromkeys(name.removeprefix(PHASE) for _, _, name in spans), *(["other"] if "other" in tops else [])]
    return [
        PhaseRow(
            *(name, seconds[name] * 1e-6, _union(kernels[name]), _union(waits[name])),
            tuple((operator, time * 1e-6) for operator, time in nlargest(_TOP, tops[name].items(), key=itemgetter(1))),
        )
        for name in names
    ]


def _kind(event: Mapping[str, Any]) -> str:
    return str(event.get("cat", ""))


def _is_phase(event: Mapping[str, Any]) -> bool:
    return _kind(event) == "user_annotation" and event["name"].startswith(PHASE)


def _own_times(operators: Sequence[tuple[float, float, str]]) -> list[tuple[float, str, float]]:
    """Return (start, name, time without inner operators) of the operators of a thread, sorted by (start, -end)."""
    own = [-end - start for start, end, _ in operators]
    open_operators = list[int]()
    for number, (start, _, _) in enumerate(operators):
        while open_operators and -operators[open_operators[-1]][1] <= start:
            open_operators.pop()
        if open_operators:
            own[open_operators[-1]] -= -operators[number][1] - start
        open_operators.append(number)
    return [(start, name, time) for (start, _, name), time in zip(operators, own, strict=True)]


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that at least one of these spans of microseconds covers."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total * 1e-6


def write_tables(folder: Path, step: int) -> Path:
    """Write `profile.md`, a table for each trace `rank-N.json.gz` of a folder, and return its path."""
    parts = [f"# Step {step} by phase\n", _COVERED]
    for trace in sorted(folder.glob("rank-*.json.gz")):
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            rows = phase_rows(json.load(file)["traceEvents"])
        parts += [
            f"## {trace.name}\n",
            "| phase | seconds | kernels | host waits | top operators |\n|---|---|---|---|---|",
        ]
        for row in rows:
            top = ", ".join(f"{name[:60]} {time:.3f} s".replace("|", "/") for name, time in row.top)
            parts.append(f"| {row.name} | {row.seconds:.3f} | {row.kernels:.3f} | {row.waits:.3f} | {top} |")
        parts.append("")
    path = folder / "profile.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path
