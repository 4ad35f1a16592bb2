"""Which kernels take the time of a step, and how busy its streams are."""

from collections import defaultdict

import torch
from measure import CUDA, Call, synchronize, table


def kernel_times(step: Call) -> str:
    """Report one profiled step: how busy the busiest streams were, and the 25 kernels that took most time.

    On a CPU: its operators.
    """
    kind = torch.profiler.ProfilerActivity.CUDA if CUDA else torch.profiler.ProfilerActivity.CPU
    step()
    synchronize()
    with torch.profiler.profile(activities=[kind]) as profile:
        step()
        synchronize()
    wanted = torch.autograd.DeviceType.CUDA if CUDA else torch.autograd.DeviceType.CPU
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    totals: dict[str, list[float]] = defaultdict(list)
    streams_of: dict[str, set[int]] = defaultdict(set)
    for event in profile.events():
        if event.device_type == wanted:
            stream = event.device_resource_id if CUDA else 0
            spans[stream].append((event.time_range.start, event.time_range.end))
            totals[event.name].append(event.time_range.elapsed_us())
            streams_of[event.name].add(stream)
    every = [span for own in spans.values() for span in own]
    wall = max(end for _, end in every) - min(start for start, _ in every)
    busiest = sorted(spans.items(), key=lambda item: -_covered(item[1]))[:8]  # each branch of a CUDA graph is a stream
    streams: list[list[object]] = [[stream, _covered(own) * 1e-3] for stream, own in busiest]
    streams += [["any", _covered(every) * 1e-3], ["none", (wall - _covered(every)) * 1e-3]]
    largest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:25]
    rows: list[list[object]] = [
        [len(streams_of[name]), len(times), sum(times) * 1e-3, sum(times) / len(times), name.replace("|", "/")[:110]]
        for name, times in largest
    ]
    return "\n\n".join(
        [table(["stream", "busy ms"], streams), table(["streams", "calls", "ms", "us each", "kernel"], rows)]
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
