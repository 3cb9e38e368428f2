"""Times of captured work: a CUDA graph's replays, and the bandwidth they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """Microseconds of one call: the median over repeats, and their 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


def replay_time(calls: Sequence[Callable[[], object]], repeats: int = 20, least_us: float = 2000.0) -> Spread:
    """Time of one call, all of them captured one behind the other in one CUDA graph.

    The calls do the same work on different data, so that together they exceed the cache. A repeat replays the graph
    until it has run for about ``least_us``.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # compiled and warmed up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def elapsed(replays: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    elapsed(2)
    replays = max(1, round(least_us / max(elapsed(1), 1.0)))
    return Spread.of([elapsed(replays) / replays / len(calls) for _ in range(repeats)])


def copy_bandwidths(size: int = 2**31) -> dict[str, float]:
    """Bytes a second, read and written, of a large copy on the device, by the way it is made.

    ``memcpy`` is the driver's, called one by one; ``captured memcpy`` the same as a graph's node; ``kernel`` an
    elementwise kernel that loads and stores 16 bytes at a time, in a graph.
    """
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    times = {
        "captured memcpy": replay_time([lambda: target.copy_(source)], repeats=10).median,
        "kernel": replay_time([lambda: torch.neg(source, out=target)], repeats=10).median,
    }
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    singles = []
    for _ in range(10):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        singles.append(1000 * start.elapsed_time(end))
    times["memcpy"] = statistics.median(singles)
    return {name: 2 * size / time * 1e6 for name, time in times.items()}
