"""Watches the generator itself: pauses of its process and jumps of the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

INTERVAL = 0.1  # seconds between two looks
JUMP = 0.5  # seconds by which the wall clock must leave the monotonic one to count as a jump
STALL = 0.5  # seconds by which a look must be late to count as a stall


def same_clock() -> str:
    """What processes have in common whose monotonic clocks agree: they run on one boot of one kernel. Else empty."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Watch:
    """Call ``look`` every ``INTERVAL`` seconds.

    All latencies are taken from the monotonic clock, so a jump of the wall clock spoils none; it is counted because
    start times in the record, and server logs beside it, no longer line up. A stall (a busy machine, a paused process)
    delays sends and time stamps alike and does spoil those it meets.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._due = monotonic() + INTERVAL
        self._offset = wall() - monotonic()
        self.lags: list[float] = []  # how late each look was, seconds
        self.stalls = 0
        self.jumps: list[float] = []  # by how much the wall clock jumped each time, seconds

    def look(self) -> None:
        """Compare both clocks with the last look."""
        now = self._monotonic()
        lag = max(now - self._due, 0.0)
        self.lags.append(lag)
        self.stalls += lag > STALL
        offset = self._wall() - self._monotonic()
        if abs(offset - self._offset) > JUMP:
            self.jumps.append(offset - self._offset)
            self._offset = offset
        self._due = self._monotonic() + INTERVAL
