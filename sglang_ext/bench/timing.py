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


def copy_bandwidth(size: int = 2**31) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time = replay_time([lambda: target.copy_(source)], repeats=10)
    return 2 * size / time.median * 1e6
