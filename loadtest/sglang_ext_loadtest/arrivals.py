"""When requests of an open loop are due, fixed before the run: a slow server does not slow the arrivals."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.errors import UsageError
from sglang_ext_loadtest.settings import Load


def arrivals(load: Load, rate: float, worker: int = 0) -> Iterator[float]:
    """Seconds after the start at which one worker's requests are due, endless but for a trace.

    Args:
        load: the kind of arrivals, their seed, and the number of workers that share them.
        rate: requests per second over all workers (ignored by a trace).
        worker: whose share; the shares of all workers together are the whole schedule.

    Raises:
        UsageError: the trace cannot be read.
    """
    for index, due in enumerate(_all(load, rate)):
        if index % load.workers == worker:
            yield due


def _all(load: Load, rate: float) -> Iterator[float]:
    if load.arrivals == "trace":
        yield from read_trace(Path(load.trace or ""))
        return
    source = random.Random(f"{load.seed}/{rate}")
    due = 0.0
    while True:
        yield due
        due += source.expovariate(rate) if load.arrivals == "poisson" else 1 / rate


def read_trace(path: Path) -> list[float]:
    """Arrival times of a recorded trace, from 0, in seconds.

    A line is a number of seconds, or a JSON object with "timestamp" in milliseconds (as in the Mooncake traces).

    Raises:
        UsageError: the file is missing, empty, or a line is neither.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"There is no trace at {path} ({error}); give a file of arrival times.") from None
    times = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            times.append(float(value["timestamp"]) / 1000 if isinstance(value, dict) else float(value))
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f'Line {number} of {path} is no arrival time; write seconds, or {{"timestamp": milliseconds}}.'
            ) from None
    if not times:
        raise UsageError(f"{path} holds no arrival times; write one a line.")
    times.sort()
    return [at - times[0] for at in times]
